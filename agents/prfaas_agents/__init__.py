"""Learned schedulers: PPO through Stable-Baselines3, and the policy that runs what was learned.

`prfaas_env.policy.make_policy("ppo:path=FOLDER/policy.zip")` loads a trained one by name.
"""
