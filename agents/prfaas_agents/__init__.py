"""Learned schedulers: five algorithms of Stable-Baselines3 and sb3-contrib, and the policy that runs what was learned.

`prfaas_env.policy.make_policy("ppo:path=FOLDER/policy.zip")` loads a trained one by name.
"""
