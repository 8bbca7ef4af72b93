"""Train, compare and demonstrate schedulers. `prfaas train`, `evaluate`, `compare` and `demo` live here."""
