"""Hyper-parameters of each algorithm, as frozen models; importing this loads nothing heavy.

One step is one decision. Defaults are those that learned best within minutes on two cores.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prfaas_env.base import Frozen
from prfaas_env.decision import ActionForm

ActivationName = Literal["tanh", "relu"]
AlgorithmName = Literal["ppo", "maskable_ppo", "recurrent_ppo", "sac", "tqc"]


class RollOutSettings(Frozen):
    """How choices are priced by roll-outs (see `roll_outs`), and how a policy is fitted to their prices."""

    states: int = Field(default=30_000, ge=1, description="states priced (in a round)")
    horizon_s: float = Field(default=90.0, gt=0, description="how long the copies of a state run on")
    n_envs: int = Field(default=32, ge=1)
    priced_share: float = Field(default=0.5, gt=0, le=1, description="share of the states that are priced")
    idle_share: float = Field(
        default=0.125, ge=0, le=1, description="share of the envs that never move a node"
    )
    detour_share: float = Field(default=0.375, ge=0, le=1, description="share of the envs sent on detours")
    cost_scale_s: float = Field(
        default=50.0, gt=0, description="request-seconds; prices beyond weigh less (Huber loss)"
    )
    sharpness: float = Field(default=3.0, gt=0, description="logits per scale of price")
    epochs: int = Field(default=4, ge=1, description="passes over all priced states (per round)")
    batch_size: int = Field(default=512, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0, description="at the start (of a round); falls to 1%")
    weight_decay: float = Field(default=1e-4, ge=0)


class WarmStartSettings(RollOutSettings):
    """The first policy of a learner, from roll-outs (see `warm_start`)."""

    rounds: int = Field(default=4, ge=1, description="each plays with the policy of the last one")
    move_cost_s: float = Field(
        default=0.0, ge=0, description="request-seconds that a move costs whatever the roll-outs say"
    )


class RoutingFitSettings(RollOutSettings):
    """The routing of a policy that has learned its moves, from roll-outs (see `routing_fit`)."""

    states: int = Field(default=40_000, ge=1, description="states priced")
    idle_share: float = Field(default=0.0, ge=0, le=1, description="share of the envs that never move a node")
    detour_share: float = Field(default=0.125, ge=0, le=1, description="share of the envs sent on detours")
    cost_scale_s: float = Field(
        default=10.0, gt=0, description="request-seconds; prices beyond weigh less (Huber loss)"
    )
    epochs: int = Field(default=12, ge=1, description="passes over all priced states")


class LearnerSettings(Frozen):
    """What every algorithm has."""

    algorithm: ClassVar[AlgorithmName]
    #: The form of the actions that the algorithm learns.
    form: ClassVar[ActionForm]

    hidden: tuple[int, ...] = Field(default=(64, 64), description="units per hidden layer")
    activation: ActivationName = Field(default="tanh", description="of the hidden layers")
    learning_rate: float = Field(default=1e-3, gt=0, description="at the start")
    final_learning_rate: float = Field(default=1e-4, gt=0, description="at the end; linear in between")
    gamma: float = Field(default=0.95, gt=0, lt=1, description="discount per decision")
    batch_size: int = Field(default=256, ge=2, description="decisions per gradient step")
    scaling_steps: int = Field(
        default=240, ge=1, description="decisions per env from which the fixed input scaling is measured"
    )

    @model_validator(mode="after")
    def _sizes(self) -> LearnerSettings:
        if not self.hidden or any(units < 1 for units in self.hidden):
            raise ValueError(
                f"hidden must be one or more layers of 1 or more units, found {list(self.hidden)}"
            )
        return self

    @property
    def network(self) -> dict[str, int]:
        """Sizes of the network beside `hidden`, by Stable-Baselines3's names."""
        return {}

    @property
    def log_steps(self) -> int:
        """Fewest decisions between two entries in TensorBoard; 0 for one per rollout."""
        return 0

    def keywords(self) -> dict[str, Any]:
        """Arguments of the algorithm's class that stand here under its own names."""
        return self.model_dump(include={"gamma", "batch_size"})


class PpoSettings(LearnerSettings):
    """PPO of Stable-Baselines3 with a small network for actor and critic each."""

    algorithm: ClassVar[AlgorithmName] = "ppo"
    form: ClassVar[ActionForm] = "discrete"

    n_steps: int = Field(default=32, ge=2, description="decisions per env between two updates")
    n_epochs: int = Field(default=8, ge=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0)
    ent_coef: float = Field(default=0.0, ge=0)
    vf_coef: float = Field(default=0.5, ge=0)
    adam_epsilon: float = Field(
        default=1e-5, gt=0, description="of Adam; small gradients need a smaller one than PPO's usual one"
    )
    max_grad_norm: float = Field(default=0.5, gt=0)
    target_kl: float | None = Field(default=None, gt=0)
    neutral_routing: float = Field(
        default=0.95, gt=0, lt=1, description='first probability of "margin 0" (or of the paper\'s threshold)'
    )
    neutral_move: float = Field(default=0.95, gt=0, lt=1, description='first probability of "no move"')

    def keywords(self) -> dict[str, Any]:
        """Arguments of the algorithm's class that stand here under its own names."""
        own = {"n_steps", "n_epochs", "gae_lambda", "clip_range", "ent_coef", "vf_coef"}
        return {**super().keywords(), **self.model_dump(include={*own, "max_grad_norm", "target_kl"})}


class MaskablePpoSettings(PpoSettings):
    """PPO of sb3-contrib that never draws a move that is not legal."""

    algorithm: ClassVar[AlgorithmName] = "maskable_ppo"


class RecurrentPpoSettings(PpoSettings):
    """PPO of sb3-contrib with an LSTM layer each for actor and critic before the hidden ones."""

    algorithm: ClassVar[AlgorithmName] = "recurrent_ppo"

    hidden: tuple[int, ...] = Field(default=(64,), description="units per hidden layer (tanh)")
    lstm_units: int = Field(default=64, ge=1)

    @property
    def network(self) -> dict[str, int]:
        """Sizes of the network beside `hidden`, by Stable-Baselines3's names."""
        return {"lstm_hidden_size": self.lstm_units}


class SacSettings(LearnerSettings):
    """SAC of Stable-Baselines3 on the continuous actions."""

    algorithm: ClassVar[AlgorithmName] = "sac"
    form: ClassVar[ActionForm] = "continuous"

    buffer_size: int = Field(
        default=50_000, ge=1, description="decisions kept to learn from, all envs together"
    )
    learning_starts: int = Field(default=1_000, ge=0, description="decisions with uniform actions at first")
    train_freq: int = Field(default=1, ge=1, description="decisions per env between two updates")
    gradient_steps: int = Field(default=4, ge=1, description="gradient steps per update")
    tau: float = Field(default=0.005, gt=0, le=1)
    ent_coef: float | None = Field(default=None, gt=0, description="fixed; learned where there is none")
    first_ent_coef: float = Field(default=0.01, gt=0, description="where a learned one starts")
    first_std: float = Field(
        default=0.7, gt=0, description="first spread of the actions before tanh, around the neutral one"
    )
    log_every: int = Field(default=1_024, ge=1, description="decisions between two entries in TensorBoard")

    @property
    def log_steps(self) -> int:
        """Fewest decisions between two entries in TensorBoard; 0 for one per rollout."""
        return self.log_every

    def keywords(self) -> dict[str, Any]:
        """Arguments of the algorithm's class that stand here under its own names."""
        own = {"buffer_size", "learning_starts", "train_freq", "gradient_steps", "tau"}
        ent_coef = f"auto_{self.first_ent_coef}" if self.ent_coef is None else self.ent_coef
        return {**super().keywords(), **self.model_dump(include=own), "ent_coef": ent_coef}


class TqcSettings(SacSettings):
    """TQC of sb3-contrib: SAC with quantiles of the return, the highest of which are dropped."""

    algorithm: ClassVar[AlgorithmName] = "tqc"

    n_quantiles: int = Field(default=25, ge=2, description="per critic, of which there are two")
    top_quantiles_to_drop: int = Field(default=2, ge=0, description="per critic")

    @model_validator(mode="after")
    def _some_left(self) -> TqcSettings:
        if self.top_quantiles_to_drop >= self.n_quantiles:
            raise ValueError(
                f"top_quantiles_to_drop {self.top_quantiles_to_drop} leaves none of {self.n_quantiles} quantiles"
            )
        return self

    @property
    def network(self) -> dict[str, int]:
        """Sizes of the network beside `hidden`, by Stable-Baselines3's names."""
        return {"n_quantiles": self.n_quantiles}

    def keywords(self) -> dict[str, Any]:
        """Arguments of the algorithm's class that stand here under its own names."""
        return {**super().keywords(), "top_quantiles_to_drop_per_net": self.top_quantiles_to_drop}


#: Settings of each algorithm by its name.
SETTINGS: dict[AlgorithmName, type[LearnerSettings]] = {
    "ppo": PpoSettings,
    "maskable_ppo": MaskablePpoSettings,
    "recurrent_ppo": RecurrentPpoSettings,
    "sac": SacSettings,
    "tqc": TqcSettings,
}
