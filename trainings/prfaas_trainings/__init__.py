"""Train, compare and demonstrate schedulers. `prfaas train`, `prfaas compare` and `prfaas demo` live here."""
