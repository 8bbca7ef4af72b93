"""Decide at run time which LLM prompts are prefilled remotely and how many local nodes prefill or decode.

Importing this package registers `PrfaaS-v0` with Gymnasium; nothing heavy is loaded before the env is made.
"""

from importlib import metadata

import gymnasium

ENV_ID = "PrfaaS-v0"

__version__ = metadata.version("prfaas-env")


def register_envs() -> None:
    """Register the env once; a second import (for example in a spawned worker) changes nothing."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            id=ENV_ID,
            entry_point="prfaas_env.env:PrfaasEnv",
            vector_entry_point="prfaas_env.vector:PrfaasVectorEnv",
        )


register_envs()

__all__ = ["ENV_ID", "__version__", "register_envs"]
