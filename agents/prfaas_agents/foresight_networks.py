"""Actor-critic networks whose critic reads more than their actor (see `foresight`)."""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import MlpExtractor


class ForesightMlp(MlpExtractor):
    """Layers of actor and critic, of which the actor reads all columns but the last `hidden_fields`."""

    def __init__(self, feature_dim: int, hidden_fields: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(feature_dim, *args, **kwargs)
        self._seen = feature_dim - hidden_fields
        self.policy_net = MlpExtractor(self._seen, *args, **kwargs).policy_net

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent vectors of actor and critic."""
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        """Latent vector of the actor; the critic's columns may be missing."""
        latent: torch.Tensor = self.policy_net(features[..., : self._seen])
        return latent


class _Sighted:
    """An actor-critic policy whose critic reads `foresight_fields` more columns than its actor."""

    def __init__(self, *args: Any, foresight_fields: int = 0, **kwargs: Any) -> None:
        self.foresight_fields = foresight_fields
        super().__init__(*args, **kwargs)

    def _build_mlp_extractor(self: Any) -> None:
        if not self.foresight_fields:
            super()._build_mlp_extractor()  # draws the same first weights as ever
            return
        self.mlp_extractor = ForesightMlp(
            self.features_dim,
            self.foresight_fields,
            net_arch=self.net_arch,
            activation_fn=self.activation_fn,
            device=self.device,
        )


class ForesightPolicy(_Sighted, ActorCriticPolicy):
    """Of PPO."""


class MaskableForesightPolicy(_Sighted, MaskableActorCriticPolicy):
    """Of maskable PPO."""
