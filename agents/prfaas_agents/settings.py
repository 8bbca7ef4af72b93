"""Hyper-parameters of PPO, as a frozen model; importing this loads nothing heavy."""

from __future__ import annotations

from pydantic import Field, model_validator

from prfaas_env.base import Frozen


class PpoSettings(Frozen):
    """PPO of Stable-Baselines3 with a small network for actor and critic each.

    One step is one decision. Defaults are those that learned best within minutes on two cores.
    """

    hidden: tuple[int, ...] = Field(default=(64, 64), description="units per hidden layer (tanh)")
    learning_rate: float = Field(default=1e-3, gt=0, description="at the start")
    final_learning_rate: float = Field(default=1e-4, gt=0, description="at the end; linear in between")
    n_steps: int = Field(default=32, ge=2, description="decisions per env between two updates")
    batch_size: int = Field(default=256, ge=2, description="decisions per gradient step")
    n_epochs: int = Field(default=8, ge=1)
    gamma: float = Field(default=0.95, gt=0, lt=1, description="discount per decision")
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0)
    ent_coef: float = Field(default=0.0, ge=0)
    vf_coef: float = Field(default=0.5, ge=0)
    max_grad_norm: float = Field(default=0.5, gt=0)
    target_kl: float | None = Field(default=None, gt=0)
    scaling_steps: int = Field(
        default=240, ge=1, description="decisions per env from which the fixed input scaling is measured"
    )
    neutral_routing: float = Field(
        default=0.95, gt=0, lt=1, description='first probability of "margin 0" (or of the paper\'s threshold)'
    )
    neutral_move: float = Field(default=0.95, gt=0, lt=1, description='first probability of "no move"')

    @model_validator(mode="after")
    def _sizes(self) -> PpoSettings:
        if not self.hidden or any(units < 1 for units in self.hidden):
            raise ValueError(
                f"hidden must be one or more layers of 1 or more units, found {list(self.hidden)}"
            )
        return self
