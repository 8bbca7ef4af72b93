"""Hand-written schedulers: fixed rules, earliest finish, and the paper's dual-timescale scheduler.

Every one is a `prfaas_env.policy.Policy`; `prfaas_env.policy.make_policy` finds them by name.
"""
