"""The study's bookkeeping: predictions on the same requests, intervals, order, a page that says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from tests.real import sim_to_real
from tests.real.sim_to_real import PAGE, base_scenario, study_policies
from tests.real.sim_to_real_results import (
    NOTHING,
    Piece,
    compared,
    figures,
    json_of,
    marks,
    order,
    plot,
    predicted,
    table,
    write_page,
)

ROOT = Path(__file__).parents[2]


def piece(ttft_s: Any, policy: str = "never", seed: int = 1, **fields: Any) -> Piece:
    """One request a second."""
    times = tuple(float(x) for x in ttft_s)
    return Piece(policy, seed, tuple(float(k) for k in range(len(times))), times, 0, **fields)


def test_figures_by_hand() -> None:
    """Two pieces of 20 s, all of 1 s and all of 3 s: four blocks, mean 2, P90 3."""
    found = figures([piece([1.0] * 20), piece([3.0] * 20)])
    assert (found["requests"], found["pieces"]) == (40, 2)
    assert found["mean_s"]["value"] == 2.0
    assert found["p90_s"]["value"] == 3.0
    # the mean of four draws from (1, 1, 3, 3): 1 in 16 are all of one kind
    assert (found["mean_s"]["low"], found["mean_s"]["high"]) == (1.0, 3.0)
    assert figures([piece([1.0] * 20)])["mean_s"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    luck = np.random.default_rng(5)
    inside = 0
    for _ in range(60):
        found = figures([piece(luck.exponential(1.0, 60)) for _ in range(5)], resamples=300)["mean_s"]
        inside += found["low"] <= 1.0 <= found["high"]
    assert inside >= 50


def test_errors_are_of_the_measured_value() -> None:
    row = compared(figures([piece([2.0] * 10)]), figures([piece([1.5] * 10)]))
    assert row["error"] == {"mean_s": -0.25, "p90_s": -0.25}
    assert row["predicted"]["mean_s"] == 1.5


def row(low: float, value: float, high: float, predicted_s: float) -> dict[str, Any]:
    return {
        "measured": {"mean_s": {"low": low, "value": value, "high": high}},
        "predicted": {"mean_s": predicted_s},
    }


def test_only_pairs_that_are_apart_count_for_the_order() -> None:
    policies = {"a": row(1, 2, 3, 2.0), "b": row(2.5, 3, 4, 1.0), "c": row(5, 6, 7, 1.5)}
    found = order(policies)
    assert found["pairs"] == 3
    assert found["apart"] == [["a", "c"], ["b", "c"]]
    assert found["otherwise"] == [["a", "c"]], "a is measured before c and predicted behind it"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The base scenario of the study."""
    path = tmp_path / "base.yaml"
    path.write_text(
        yaml.safe_dump(base_scenario("tiny", sim_to_real.FAKE_KV, {256: 0.05, 1024: 0.2}, 3.0, 2e7))
    )
    return path


def test_a_prediction_is_of_the_same_requests_under_any_policy(base: Path) -> None:
    scenario = load_scenario(base)
    pieces = [predicted(scenario, policy, 7, 30.0) for policy in ("never", "always", study_policies()[0])]
    assert len({p.arrival_s for p in pieces}) == 1
    local, remote, some = (p.remote for p in pieces)
    assert (local, remote) == (0, len(pieces[0].ttft_s))
    assert 0 < some < remote
    assert min(pieces[0].ttft_s) > 0.05


def test_the_policies_are_one_fitted_threshold_three_others_and_three_rules() -> None:
    policies = study_policies()
    assert len(set(policies)) == 7
    assert sum(p.startswith("static") for p in policies) == 4
    tokens = [float(p.partition("=")[2]) for p in policies[:4]]
    assert tokens[0] == pytest.approx(sim_to_real.MEDIAN_TOKENS, rel=0.02)


def result() -> dict[str, Any]:
    policies = {}
    for k, name in enumerate(study_policies()):
        measured = figures([piece([1.0 + 0.1 * k] * 20, name)])
        simulated = figures([piece([1.0 + 0.12 * k] * 20, name)])
        policies[name] = {
            "threshold": name.startswith("static"),
            "fitted_on": k == 0,
            **compared(measured, simulated),
        }
    return {
        "deployment": {
            "model": "tiny",
            "n_tokens_median": 700,
            "rate_rps": 3.0,
            "link_bps": 2e7,
            "piece_s": 60.0,
        },
        "fit": {"requests": 99, "fits": {}},
        "policies": policies,
        "order": order(policies),
    }


def test_a_page_holds_the_figures_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = marks("real")
    page.write_text(f"head\n{begin}\nstale line\n{end}\ntail\n")
    found = result()
    write_page(found, page, "real")
    text = page.read_text()
    assert text.startswith("head\n")
    assert text.endswith(f"{end}\ntail\n")
    assert "stale line" not in text
    assert "| `never` | 0% | 1,400 [1,400, 1,400] | 1,480 | +5.7% |" in text
    assert "6 of 6 figures" in text
    assert json.loads(json_of(page, "real").read_text()) == found
    page.write_text("no marks")
    with pytest.raises(PrfaasError, match="marks"):
        write_page(found, page, "real")


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    plot(result(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["real", "known"])
def test_the_shipped_page_says_what_its_json_says(kind: str) -> None:
    shipped = json_of(PAGE, kind)
    begin, end = marks(kind)
    inside = PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()
    if shipped.exists():
        assert inside == table(json.loads(shipped.read_text(encoding="utf-8")))
        assert (PAGE.parent / "img" / f"sim-to-real-{kind}.png").exists()
    else:
        assert inside == NOTHING


def test_a_piece_survives_its_file() -> None:
    one = piece([0.123456789, 2.0], failed=1, foreign_share=0.25)
    again = Piece.from_json(json.loads(json.dumps(one.as_json())))
    assert again.ttft_s == (0.123457, 2.0)
    assert (again.failed, again.foreign_share, again.arrival_s) == (1, 0.25, (0.0, 1.0))
