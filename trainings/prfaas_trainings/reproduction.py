"""The paper's table 6 three times: as published, by its equations, and by simulation at low load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from prfaas_env.policy import make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import DEFAULT_ENGINE
from prfaas_env.simulator.run import simulate
from prfaas_env.theory import Optimum, plan
from prfaas_trainings.seeds import SPLITS

#: Arrival rate of the simulation: so low that queues hardly form.
LOW_LOAD_RPS = 0.1
#: Requests per simulated column.
REQUESTS = 20_000


@dataclass(frozen=True)
class Published:
    """One column of the paper's table 6 (arXiv 2604.15039); None where the table has a dash."""

    name: str
    title: str
    policy: str
    deployment: str | None
    threshold_tokens: float | None
    split: tuple[int | None, int | None, int]
    """Instances: PrfaaS, local prefill, local decode."""
    service_ttft_mean_s: float
    service_ttft_p90_s: float
    theta_prfaas_rps: float | None
    theta_pdp_rps: float | None
    theta_pdd_rps: float
    lambda_max_rps: float
    offload_share: float | None


PUBLISHED = (
    Published(
        "prfaas", "PrfaaS-PD", "static:threshold_tokens=19400", None, 19_400, (4, 3, 5),
        2.22, 3.51, 1.61, 1.64, 3.91, 3.24, 0.496,
    ),
    Published(
        "homogeneous", "homogeneous PD", "never", "homogeneous", None, (None, 9, 3),
        4.44, 9.73, None, 2.11, 2.35, 2.11, None,
    ),
    Published(
        "naive", "naive heterogeneous", "always", "naive", None, (4, None, 8),
        1.74, 3.51, 2.45, None, 6.25, 2.45, None,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One deployment: published, by the equations with representative lengths and with mean service times, simulated.

    `simulated` holds `service_ttft_mean_s`, `service_ttft_p90_s`, `ttft_mean_s`, `ttft_p90_s`, `offload_share`.
    """

    published: Published
    equations: Optimum
    equations_service: Optimum
    simulated: dict[str, float]


def _simulated(scenario: Scenario, column: Published, requests: int, engine: str) -> dict[str, float]:
    placed = scenario if column.deployment is None else load_scenario(scenario, deployment=column.deployment)
    episode = simulate(
        placed.with_rate(LOW_LOAD_RPS),
        make_policy(column.policy),
        seed=SPLITS["test"].start,
        engine=engine,
        n_requests=requests,
    )
    m: dict[str, Any] = episode.metrics
    return {
        "service_ttft_mean_s": m["service_ttft_s"]["mean"],
        "service_ttft_p90_s": m["service_ttft_s"]["p90"],
        "ttft_mean_s": m["ttft_s"]["mean"],
        "ttft_p90_s": m["ttft_s"]["p90"],
        "offload_share": m["offload_share"],
    }


def reproduce(requests: int = REQUESTS, engine: str = DEFAULT_ENGINE) -> tuple[Column, ...]:
    """The paper's case study anew: both forms of the equations, and `requests` simulated ones per column.

    The largest rate is not simulated: it is a limit of the equations, at which queues grow without bound.
    """
    scenario = load_scenario("paper")
    representative, service = plan(scenario), plan(scenario, means="service")
    return tuple(
        Column(
            column,
            representative[column.name],
            service[column.name],
            _simulated(scenario, column, requests, engine),
        )
        for column in PUBLISHED
    )


def rows(columns: tuple[Column, ...]) -> list[dict[str, Any]]:
    """The table: one row per figure, with per column the published, computed and simulated text ("" where absent)."""
    out = []
    for title, published, equations, simulated in _ROWS:
        cells = [
            (published(c.published), equations(c), "" if simulated is None else simulated(c)) for c in columns
        ]
        out.append({"title": title, "cells": cells})
    return out


def _text(value: float | None, digits: int = 2) -> str:
    return "" if value is None or math.isinf(value) or value == 0 else f"{value:,.{digits}f}"


def _split(parts: tuple[float | None, ...]) -> str:
    return " / ".join("-" if not p else f"{p:g}" for p in parts)


_ROWS: tuple[tuple[str, Any, Any, Any], ...] = (
    (
        "threshold (tokens)",
        lambda p: _text(p.threshold_tokens, 0),
        lambda c: _text(c.equations.threshold_tokens, 0),
        None,
    ),
    (
        "instances: PrfaaS / prefill / decode",
        lambda p: _split(p.split),
        lambda c: _split((c.equations.n_prfaas, c.equations.n_prefill, c.equations.n_decode)),
        None,
    ),
    (
        "service TTFT, mean (s)",
        lambda p: _text(p.service_ttft_mean_s),
        lambda c: _text(c.equations.service_ttft_mean_s),
        lambda c: _text(c.simulated["service_ttft_mean_s"]),
    ),
    (
        "service TTFT, P90 (s)",
        lambda p: _text(p.service_ttft_p90_s),
        lambda c: _text(c.equations.service_ttft_p90_s),
        lambda c: _text(c.simulated["service_ttft_p90_s"]),
    ),
    (
        "whole TTFT at low load, mean (s)",
        lambda p: "",
        lambda c: "",
        lambda c: _text(c.simulated["ttft_mean_s"]),
    ),
    (
        "stage limit PrfaaS (req/s)",
        lambda p: _text(p.theta_prfaas_rps),
        lambda c: _text(c.equations.theta_prfaas_rps),
        None,
    ),
    (
        "stage limit local prefill (req/s)",
        lambda p: _text(p.theta_pdp_rps),
        lambda c: _text(c.equations.theta_pdp_rps),
        None,
    ),
    (
        "stage limit decode (req/s)",
        lambda p: _text(p.theta_pdd_rps),
        lambda c: _text(c.equations.theta_pdd_rps),
        None,
    ),
    (
        "largest rate (req/s)",
        lambda p: _text(p.lambda_max_rps),
        lambda c: _text(c.equations.lambda_max_rps),
        None,
    ),
    (
        "largest rate with mean service times (req/s)",
        lambda p: "",
        lambda c: _text(c.equations_service.lambda_max_rps),
        None,
    ),
    (
        "offloaded (%)",
        lambda p: "" if p.offload_share is None else _text(100 * p.offload_share, 1),
        lambda c: _text(100 * c.equations.offload_share, 1),
        lambda c: _text(100 * c.simulated["offload_share"], 1),
    ),
)
