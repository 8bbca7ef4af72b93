"""A trained policy as a `prfaas_env.policy.Policy`: the same file in `simulate`, `compare` and anywhere else."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.policies import BasePolicy

from prfaas_agents.algorithms import ALGORITHMS, make_network
from prfaas_agents.foresight import FORESIGHT
from prfaas_agents.record import PolicyRecord, check_fits, read_record, resolve
from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import OwnInterval, PolicyContext
from prfaas_env.telemetry import Telemetry


def load_network(file: Path, record: PolicyRecord) -> BasePolicy:
    """The network of a Stable-Baselines3 file, from its plain weights alone: nothing pickled is run.

    Raises:
        PrfaasError: the file is not such a file, or its weights do not fit the record.
    """
    network = make_network(record)
    try:
        with zipfile.ZipFile(file) as archive, archive.open("policy.pth") as weights:
            state = torch.load(weights, map_location="cpu", weights_only=True)
        network.load_state_dict(state)
    except Exception as error:  # a broken file makes each reader raise something of its own
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrfaasError(f"{file}: is not the policy that its record describes: {first}") from None
    network.set_training_mode(False)
    return network


class LearnedPolicy:
    """A trained policy, deterministic.

    It decides every `decision_interval_s` that it was trained with and holds its routing between; a move is
    ordered once. A move that is not legal now becomes none; a policy that learned with masks gets them here too.

    Args:
        path: `policy.zip` of a training run, or the folder that holds it.

    Raises:
        PrfaasError: no such file, a file that does not fit its record; in `reset`: other telemetry than the
            policy was trained on (the fields are named), links that join other clusters (they are named), or a
            control interval that does not divide its own.
    """

    constant = False
    learned = True

    def __init__(self, path: str | Path | None = None) -> None:
        if path is None:
            raise PrfaasError("policy 'ppo': name its file: ppo:path=FOLDER/policy.zip")
        self.file = resolve(str(path))
        self.record = read_record(self.file)
        self._network = load_network(self.file, self.record)
        self._codec = self.record.action.codec()
        self._clock = OwnInterval(self.record.decision_interval_s, f"policy {self.file}")
        self._state: tuple[NDArray[Any], ...] | None = None

    @property
    def fingerprint(self) -> str:
        """12 hex digits of the weights' file."""
        return self.record.weights_sha256[:12]

    @property
    def decision_interval_s(self) -> float:
        """Time between two decisions: it need not be asked in between."""
        return self.record.decision_interval_s

    @property
    def seen_seeds(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the episode seeds that it was trained or chosen on."""
        return tuple(self.record.seed_ranges.values())

    @property
    def seen_slices(self) -> tuple[tuple[str, float, float], ...]:
        """(file, first second, last second) of the traces that it was trained on."""
        return tuple(t.slice for t in self.record.trained_on if t.slice is not None)

    def reset(self, context: PolicyContext) -> None:
        """Start an episode; refuses a deployment that it does not fit."""
        check_fits(self.record, context, self.file)
        self._clock.reset(context)
        self._state = None

    def decide(self, telemetry: Telemetry) -> Decision:
        """A new decision at the start of each interval of its own, the held one in between."""
        if not self._clock.is_due(telemetry):
            return self._clock.held
        return self._clock.decided(telemetry, self._codec.decode(self._act(telemetry)))

    def _act(self, telemetry: Telemetry) -> NDArray[Any]:
        """The action of the network; the state of a recurrent one lasts from `reset` on."""
        algorithm = ALGORITHMS[self.record.algorithm]
        given: dict[str, Any] = {}
        if algorithm.masks:
            given["action_masks"] = self._codec.masks(telemetry.legal_moves)
        if algorithm.recurrent:
            given["episode_start"] = np.array([self._state is None])
        seen = np.pad(telemetry.encode(), (0, self.record.network.get(FORESIGHT, 0)))
        action, self._state = self._network.predict(seen, state=self._state, deterministic=True, **given)
        return action
