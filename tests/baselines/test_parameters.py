"""Parameter models: messages for a user's mistake, and the tables in the docstrings."""

from __future__ import annotations

import pytest

from prfaas_baselines.dual_timescale import DualTimescale
from prfaas_baselines.earliest_finish import EarliestFinishConversion
from prfaas_baselines.hybrid_planner import HybridPlanner
from prfaas_baselines.length_ttft_grid import LengthTtftGrid
from prfaas_env.base import PrfaasError
from prfaas_env.policy import Policy, make_policy

RULES = [
    ("dual_timescale", DualTimescale),
    ("earliest_finish_conversion", EarliestFinishConversion),
    ("hybrid_planner", HybridPlanner),
    ("length_ttft_grid", LengthTtftGrid),
]


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_every_parameter_can_be_set_by_name(name, rule) -> None:
    defaults = rule().parameters
    for key, field in rule.Parameters.model_fields.items():
        policy = make_policy(f"{name}:{key}={field.default}")
        assert isinstance(policy, Policy)
        assert policy.parameters == defaults


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_the_docstring_lists_every_parameter(name, rule) -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in rule.__doc__.splitlines() if "|" in line
    ]
    table = {row[0]: row for row in rows}
    for key, field in rule.Parameters.model_fields.items():
        _, unit, default, meaning, left_open = table[key]
        assert unit
        assert default == str(field.default)
        assert meaning == field.description
        assert left_open == "own" or left_open.startswith("3.")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dual_timescale:step_facto=2", ["'step_facto'", "step_factor", "dual_timescale"]),
        ("dual_timescale:step_factor=1", ["step_factor", "greater than 1", "found 1"]),
        ("dual_timescale:imbalance_rule=both", ["imbalance_rule", "'terms' or 'sum'", "'both'"]),
        ("earliest_finish_conversion:rate_window_s=60", ["rate_window_s", "5, 30 or 120", "60"]),
        ("earliest_finish_conversion:margin_s=inf", ["margin_s", "finite"]),
        ("static:threshold_tokens=-1", ["threshold_tokens", "-1"]),
        ("static:threshold_tokens=many", ["threshold_tokens", "'many'"]),
        ("static:threshold_tokens=true", ["threshold_tokens", "True"]),
        ("earliest_finish:margin_s=nan", ["margin_s", "nan"]),
        ("earliest_finish:margin_s=late", ["margin_s", "'late'"]),
    ],
)
def test_a_mistake_is_one_clear_line(spec, words) -> None:
    with pytest.raises(PrfaasError) as caught:
        make_policy(spec)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
