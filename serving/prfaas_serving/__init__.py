"""A router that puts a prfaas-env decision in front of real prefill and decode workers."""
