"""Fields and their encoding, windows, observed capacity, and that nothing in a reading knows what a router cannot."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prfaas_env.decision import Decision, Move
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import ENGINES, Engine, make_engine
from prfaas_env.simulator.formulas import NEVER_NS, NS_PER_S, pipelined_open_ns
from prfaas_env.simulator.records import Route
from prfaas_env.simulator.world import CapacityTrace, World, draw_world
from prfaas_env.telemetry import (
    LENGTH_BIN_EDGES_TOKENS,
    LINK_FIELDS,
    N_LENGTH_BINS,
    PD_FIELDS,
    PRFAAS_FIELDS,
    RECENT_LENGTHS,
    SCHEMA_VERSION,
    DoorMeter,
    Field,
    LinkMeter,
    Telemetry,
    TelemetrySchema,
    decision_fields,
    encode_values,
    length_bin,
    pack,
    schema_for,
    schema_rows,
)

SCHEMA = schema_for(1, 1, 1)
S = NS_PER_S


def neutral(schema: TelemetrySchema = SCHEMA) -> list[dict[str, float]]:
    """A reading per group with every value 0 and every flag 0."""
    return [{f.name: 0.0 for f in fields} for _, fields in schema.groups]


def present(schema: TelemetrySchema = SCHEMA) -> np.ndarray[Any, Any]:
    """Values 0 with every flag 1."""
    flags = {f.flag for f in schema.fields}
    return np.array([1.0 if f.name in flags else 0.0 for f in schema.fields])


# ------------------------------------------------------------------ the schema


def test_version_and_hash_are_pinned() -> None:
    """A policy is trained for one schema. If this fails, raise SCHEMA_VERSION and say so in the changelog."""
    assert (SCHEMA_VERSION, len(SCHEMA), SCHEMA.hash) == (1, 83, "3e9d09064fca")


@pytest.mark.parametrize("topology", [(1, 1, 1), (1, 0, 0), (2, 3, 4)])
def test_names_are_unique_and_indexed(topology: tuple[int, int, int]) -> None:
    schema = schema_for(*topology)
    assert len(set(schema.names)) == len(schema.names) == len(schema) == len(schema.fields)
    assert [schema.index[name] for name in schema.names] == list(range(len(schema)))
    n_pd, n_prfaas, n_links = topology
    groups = [f"pd{i}" for i in range(n_pd)] + [f"prfaas{j}" for j in range(n_prfaas)]
    assert [g for g, _ in schema.groups] == [*groups, *(f"link{k}" for k in range(n_links))]
    assert len(schema) == n_pd * len(PD_FIELDS) + n_prfaas * len(PRFAAS_FIELDS) + n_links * len(LINK_FIELDS)


def test_every_field_is_complete() -> None:
    for fields in (PD_FIELDS, PRFAAS_FIELDS, LINK_FIELDS):
        flags = {f.name for f in fields if f.unit == "0/1"}
        for f in fields:
            assert f.low < f.high, f.name
            assert math.isfinite(f.low), f.name
            assert math.isfinite(f.high), f.name
            assert f.scale in {"linear", "log", "symlog"}, f.name
            assert f.scale_at > 0, f.name
            assert f.flag is None or f.flag in flags, f.name
            assert f.doc, f.name
            assert f.unit, f.name
            assert f.scale != "log" or f.low >= 0, f.name


_WINDOWS = ("5s", "30s", "120s")
_STAGE = ("requests", "tokens", "work_s", "oldest_s")
#: What a router can measure, as the project agreed on; all of it is there from the first version, with neutral
#: values where a scenario lacks the mechanism (retransmissions, prefix pool, KV limit, objectives).
AGREED = {
    "pd0": [
        *(f"arrival_rate_{w}_rps" for w in _WINDOWS),
        *(f"input_token_rate_{w}_tps" for w in _WINDOWS),
        *(f"length_share_{k:02d}" for k in range(24)),
        *(f"prefill_queue_{x}" for x in _STAGE),
        *(f"decode_queue_{x}" for x in _STAGE),
        *("prefill_residual_s", "prefill_busy_instances", "prefill_instances"),
        *("decode_busy_instances", "decode_instances", "decode_sequences", "decode_kv_fill"),
        *("converting_instances", "since_conversion_s", "next_conversion_s"),
        *("output_tokens_mean", "hit_share", "ttft_attainment", "tpot_attainment"),
        *("threshold_tokens", "margin_s", "cache_rule_abundant"),
    ],
    "prfaas0": [
        *(f"prefill_queue_{x}" for x in _STAGE),
        *("prefill_residual_s", "prefill_busy_instances", "prefill_instances"),
    ],
    "link0": [
        *("backlog_bytes", "backlog_s", "utilisation_5s", "utilisation_30s"),
        *("nominal_capacity_bps", "observed_capacity_bps", "observed_age_s", "retransmission_share"),
    ],
}


def test_all_agreed_fields_are_there() -> None:
    wanted = [f"{group}.{name}" for group, names in AGREED.items() for name in names]
    assert not set(wanted) - set(SCHEMA.names)


def test_fields_that_can_be_absent_have_a_flag() -> None:
    flag_of = {f.name: f.flag for f in (*PD_FIELDS, *LINK_FIELDS)}
    for name, flag in {
        "arrival_rate_5s_rps": "arrivals_valid",
        "input_token_rate_120s_tps": "arrivals_valid",
        "length_share_07": "lengths_valid",
        "since_conversion_s": "conversion_valid",
        "output_tokens_mean": "output_valid",
        "ttft_attainment": "ttft_valid",
        "tpot_attainment": "tpot_valid",
        "threshold_tokens": "threshold_valid",
        "margin_s": "margin_valid",
        "observed_age_s": "observed_valid",
    }.items():
        assert flag_of[name] == flag


def test_the_hash_sees_every_change_of_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {SCHEMA.hash, schema_for(2, 1, 1).hash, schema_for(1, 2, 1).hash, schema_for(1, 1, 2).hash}
    first = PD_FIELDS[1]
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"unit": "req/h"},
        {"low": -1.0},
        {"high": 2000.0},
        {"scale": "linear"},
        {"scale_at": 2.0},
        {"flag": None},
    ]
    for change in changes:
        fields = (PD_FIELDS[0], dataclasses.replace(first, **change), *PD_FIELDS[2:])
        monkeypatch.setattr("prfaas_env.telemetry.PD_FIELDS", fields)
        seen.add(TelemetrySchema(1, 1, 1).hash)
    monkeypatch.setattr("prfaas_env.telemetry.PD_FIELDS", (PD_FIELDS[1], PD_FIELDS[0], *PD_FIELDS[2:]))
    seen.add(TelemetrySchema(1, 1, 1).hash)
    monkeypatch.undo()
    monkeypatch.setattr("prfaas_env.telemetry.SCHEMA_VERSION", SCHEMA_VERSION + 1)
    seen.add(TelemetrySchema(1, 1, 1).hash)
    assert len(seen) == 4 + len(changes) + 2


def test_difference_names_what_was_added_removed_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    old = TelemetrySchema(1, 1, 1)
    assert old.difference(SCHEMA) == ""  # and its fields are made now, once
    extra = dataclasses.replace(PD_FIELDS[0], name="brand_new")
    monkeypatch.setattr("prfaas_env.telemetry.PD_FIELDS", (*PD_FIELDS[:-1], extra))
    new = TelemetrySchema(1, 1, 1)
    assert new.difference(old) == "added: pd0.brand_new; removed: pd0.cache_rule_abundant"
    assert old.difference(new) == "added: pd0.cache_rule_abundant; removed: pd0.brand_new"
    monkeypatch.setattr("prfaas_env.telemetry.PD_FIELDS", (PD_FIELDS[1], PD_FIELDS[0], *PD_FIELDS[2:]))
    assert (
        TelemetrySchema(1, 1, 1).difference(old) == f"moved: pd0.{PD_FIELDS[1].name}, pd0.{PD_FIELDS[0].name}"
    )
    other = dataclasses.replace(PD_FIELDS[0], unit="%")
    monkeypatch.setattr("prfaas_env.telemetry.PD_FIELDS", (other, *PD_FIELDS[1:]))
    assert TelemetrySchema(1, 1, 1).difference(old) == "same names, other units or scales"
    larger = schema_for(1, 2, 1).difference(SCHEMA)
    assert larger.startswith("added: prfaas1.prefill_queue_requests, ")
    assert f"and {len(PRFAAS_FIELDS) - 5} more; moved: link0.backlog_bytes," in larger
    assert "\n" not in larger


# ------------------------------------------------------------------ encoding

VALUES = arrays(np.float64, len(SCHEMA), elements=st.floats(allow_nan=False))


@given(VALUES)
def test_encoding_is_bounded_whatever_the_values(values: np.ndarray[Any, Any]) -> None:
    out, clipped = SCHEMA.encode(values)
    assert out.dtype == np.float32
    assert out.shape == (len(SCHEMA),)
    assert np.isfinite(out).all()
    assert (out >= 0).all()
    assert (out <= 1).all()
    assert 0 <= clipped <= len(SCHEMA)


#: Also the values at which something changes: flags around a half, ends of ranges, signed zeros.
MIXED = arrays(
    np.float64,
    len(SCHEMA),
    elements=st.one_of(
        st.sampled_from([-0.0, 0.0, 0.5, 0.51, 1.0, 3600.0, 60.0, -60.0, math.inf, -math.inf]),
        st.floats(-100.0, 1e15),
    ),
)


@given(MIXED)
def test_encoding_is_that_of_one_value_after_the_other(values: np.ndarray[Any, Any]) -> None:
    one_by_one = np.zeros(len(SCHEMA), dtype=np.float32)
    clipped = encode_values(values, *SCHEMA.scales, one_by_one)
    out = SCHEMA.encode(values)
    assert np.array_equal(out[0], one_by_one)
    assert out[1] == clipped


@given(VALUES, VALUES)
def test_encoding_is_monotone_in_each_field(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    flags = present() > 0
    low, high = (np.where(flags, 1.0, v) for v in (np.minimum(a, b), np.maximum(a, b)))
    assert (SCHEMA.encode(low)[0] <= SCHEMA.encode(high)[0]).all()


def test_encoding_uses_the_whole_range_and_tells_values_apart() -> None:
    flags = present() > 0
    span = np.array([(f.low, f.high) for f in SCHEMA.fields]).T
    steps = []
    for share in np.linspace(0, 1, 11):
        values = np.where(flags, 1.0, span[0] + share * (span[1] - span[0]))
        out, clipped = SCHEMA.encode(values)
        assert clipped == 0
        steps.append(out)
    assert (steps[0][~flags] == 0).all()
    assert (steps[-1] == 1).all()
    for below, above in pairwise(steps):
        assert (below[~flags] < above[~flags]).all()


def test_log_scales_resolve_small_values() -> None:
    """One request more in an empty queue is seen as well as 1,000 more in a long one."""
    k = SCHEMA.index["pd0.prefill_queue_requests"]
    values = present()

    def at(requests: float) -> float:
        values[k] = requests
        return float(SCHEMA.encode(values)[0][k])

    assert at(1) - at(0) == pytest.approx(math.log(2) / math.log(10_001), rel=1e-6)
    assert at(1) - at(0) > 0.9 * (at(2001) - at(1001))
    assert at(99) == pytest.approx(math.log(100) / math.log(10_001), rel=1e-6)


def test_symlog_margin_is_centred_and_odd() -> None:
    k, flag = SCHEMA.index["pd0.margin_s"], SCHEMA.index["pd0.margin_valid"]
    values = np.zeros(len(SCHEMA))
    values[flag] = 1.0
    for margin in (0.0, 0.5, 8.0, 60.0):
        values[k] = margin
        above = SCHEMA.encode(values)[0][k]
        values[k] = -margin
        assert above + SCHEMA.encode(values)[0][k] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", [n for n, f in zip(SCHEMA.names, SCHEMA.fields, strict=True) if f.flag])
def test_an_absent_field_is_zero(name: str) -> None:
    k = SCHEMA.index[name]
    flag = SCHEMA.index[f"{name.partition('.')[0]}.{SCHEMA.fields[k].flag}"]
    values = present()
    values[k] = SCHEMA.fields[k].high
    assert SCHEMA.encode(values)[0][k] == 1.0
    values[flag] = 0.0
    assert SCHEMA.encode(values)[0][k] == 0.0
    values[k] = 1e300  # and is not counted as clipped
    assert SCHEMA.encode(values)[1] == 0


def test_clips_are_counted() -> None:
    values = present()
    assert SCHEMA.encode(values)[1] == 0
    for n, name in enumerate(("pd0.decode_queue_requests", "link0.backlog_bytes", "pd0.margin_s"), start=1):
        values[SCHEMA.index[name]] = 1e18 if n < 3 else -1e18
        assert SCHEMA.encode(values)[1] == n


# ------------------------------------------------------------------ pack


def test_pack_puts_values_in_schema_order() -> None:
    schema = schema_for(2, 1, 2)
    readings = neutral(schema)
    for k, reading in enumerate(readings):
        for name in reading:
            reading[name] = 1000.0 * k + len(name)
    values = pack(schema, [dict(reversed(r.items())) for r in readings])
    expected = [
        reading[f.name] for (_, fields), reading in zip(schema.groups, readings, strict=True) for f in fields
    ]
    assert values.tolist() == expected
    assert values.dtype == np.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin_s": None}, "telemetry is not finite: pd0.margin_s"),
        ({"margin_s": math.nan}, "telemetry is not finite: pd0.margin_s"),
        (
            {"margin_s": math.inf, "hit_share": -math.inf},
            "telemetry is not finite: pd0.hit_share, pd0.margin_s",
        ),
        ({"margin_s": "three"}, "pd0: field 'margin_s' must be one number, found 'three'"),
        ({"margin_s": [1.0, 2.0]}, r"pd0: field 'margin_s' must be one number, found \[1.0, 2.0\]"),
        (
            {"margin_s": np.zeros(3)},
            r"pd0: field 'margin_s' must be one number, found array\(\[0., 0., 0.\]\)",
        ),
        ({"surprise": 1.0}, r"pd0: fields \['surprise'\] are missing or unknown"),
        ({"margin_s": ..., "surprise": 1.0}, "pd0: field 'margin_s' is missing"),
        ({"margin_s": ...}, r"pd0: fields \['margin_s'\] are missing or unknown"),
    ],
)
def test_a_wrong_reading_names_the_field(change: dict[str, Any], message: str) -> None:
    readings: list[dict[str, Any]] = neutral()
    readings[0].update(change)
    readings[0] = {k: v for k, v in readings[0].items() if v is not ...}
    with pytest.raises(ValueError, match=f"^{message}$"):
        pack(SCHEMA, readings)


def test_a_missing_group_is_named() -> None:
    with pytest.raises(ValueError, match="2 readings for 3 groups"):
        pack(SCHEMA, neutral()[:2])


# ------------------------------------------------------------------ Telemetry


def test_groups_give_fields_by_name() -> None:
    schema = schema_for(2, 1, 1)
    values = np.arange(len(schema), dtype=np.float64)
    telemetry = Telemetry(
        schema,
        1_500_000_000,
        values,
        conversion_tick=False,
        legal_moves=((False, True, False),) * 2,
        recent_lengths_tokens=(np.zeros(0, np.int64),) * 2,
    )
    assert telemetry.time_s == 1.5
    assert telemetry.pd[1].margin_s == values[schema.index["pd1.margin_s"]]
    assert telemetry.prfaas[0].prefill_instances == values[schema.index["prfaas0.prefill_instances"]]
    assert telemetry.link[0].backlog_s == values[schema.index["link0.backlog_s"]]
    start = schema.index["pd1.length_share_00"]
    assert telemetry.pd[1].length_shares.tolist() == values[start : start + 24].tolist()
    assert telemetry.as_dict() == dict(zip(schema.names, values.tolist(), strict=True))
    assert np.array_equal(telemetry.encode(), schema.encode(values)[0])
    with pytest.raises(AttributeError, match=r"no telemetry field 'pd0.backlog_s'"):
        _ = telemetry.pd[0].backlog_s


def test_schema_rows_are_the_fields() -> None:
    rows = schema_rows(SCHEMA)
    assert [r["name"] for r in rows] == list(SCHEMA.names)
    assert all(set(r) == {"name", "unit", "low", "high", "scale", "flag", "meaning"} for r in rows)
    margin = rows[SCHEMA.index["pd0.margin_s"]]
    assert (margin["unit"], margin["low"], margin["high"], margin["flag"]) == (
        "s",
        -60.0,
        60.0,
        "margin_valid",
    )


def test_decision_fields_put_infinities_at_the_ends() -> None:
    def field(name: str) -> Field:
        return next(f for f in PD_FIELDS if f.name == name)

    never = decision_fields(math.inf, None, "scarce")
    assert (never["threshold_valid"], never["margin_valid"], never["margin_s"]) == (1.0, 0.0, 0.0)
    assert never["threshold_tokens"] == field("threshold_tokens").high
    assert decision_fields(0.0, None, "scarce")["threshold_tokens"] == 0.0
    assert decision_fields(None, math.inf, "abundant")["margin_s"] == field("margin_s").high
    always = decision_fields(None, -math.inf, "abundant")
    assert (always["margin_s"], always["threshold_valid"]) == (field("margin_s").low, 0.0)
    assert always["cache_rule_abundant"] == 1.0
    assert decision_fields(None, -2.5, "scarce")["margin_s"] == -2.5


# ------------------------------------------------------------------ the door


def test_length_bins_by_hand() -> None:
    edges = LENGTH_BIN_EDGES_TOKENS
    assert (edges[0], edges[-1], len(edges)) == (128, 131_072, N_LENGTH_BINS + 1)
    assert edges[12] == pytest.approx(math.sqrt(128 * 131_072))
    assert [length_bin(x) for x in (0, 1, 127, 128, 170, 171, 4095, 4097, 98_304, 131_072, 10**9)] == [
        0, 0, 0, 0, 0, 1, 11, 12, 23, 23, 23,
    ]  # fmt: skip


@given(st.floats(0, 1e7))
def test_a_length_lies_in_its_bin(tokens: float) -> None:
    k = length_bin(tokens)
    assert k == 0 or LENGTH_BIN_EDGES_TOKENS[k] <= tokens
    assert k == N_LENGTH_BINS - 1 or tokens < LENGTH_BIN_EDGES_TOKENS[k + 1]


def test_windows_hold_whole_seconds_only() -> None:
    door = DoorMeter(None, None)
    assert door.reading(0)["arrivals_valid"] == 0.0
    door.arrival(int(0.2 * S), 1000, 1500)
    door.arrival(int(0.9 * S), 3000, 3000)
    assert door.reading(S - 1)["arrival_rate_5s_rps"] == 0.0  # second 0 has not ended
    at_1 = door.reading(S)
    assert at_1["arrivals_valid"] == 1.0
    assert (
        at_1["arrival_rate_5s_rps"] == at_1["arrival_rate_120s_rps"] == 2.0
    )  # over the one second there was
    assert at_1["input_token_rate_30s_tps"] == 4000.0  # incremental tokens
    assert at_1["hit_share"] == pytest.approx(500 / 4500)
    door.arrival(3 * S, 500, 500)
    assert door.reading(int(3.5 * S))["arrival_rate_5s_rps"] == pytest.approx(2 / 3)
    at_4 = door.reading(4 * S)
    assert at_4["arrival_rate_5s_rps"] == 3 / 4
    assert door.reading(6 * S)["arrival_rate_5s_rps"] == 1 / 5  # seconds 1..5 hold the third alone
    assert door.reading(6 * S)["arrival_rate_30s_rps"] == 3 / 6
    assert door.reading(9 * S)["arrival_rate_5s_rps"] == 0.0
    assert door.reading(120 * S)["lengths_valid"] == 1.0
    assert door.reading(123 * S)["arrival_rate_120s_rps"] == 1 / 120
    gone = door.reading(124 * S)
    assert (gone["lengths_valid"], gone["arrival_rate_120s_rps"], gone["hit_share"]) == (0.0, 0.0, 0.0)


def test_shares_means_and_attainment() -> None:
    door = DoorMeter(ttft_slo_s=2.0, tpot_slo_s=0.025)
    empty = door.reading(5 * S)
    assert [empty[k] for k in ("lengths_valid", "output_valid", "ttft_valid", "tpot_valid")] == [0.0] * 4
    for tokens in (100, 5000, 5000, 200_000):
        door.arrival(S, tokens, tokens)
    for ttft_s in (1.0, 2.0, 2.1):
        door.first_token(S, ttft_s)
    door.finished(S, 100, 0.025)
    door.finished(S, 300, 0.026)
    door.rejected(S)
    out = door.reading(2 * S)
    shares = [out[f"length_share_{k:02d}"] for k in range(N_LENGTH_BINS)]
    assert (shares[0], shares[12], shares[23], sum(shares)) == (0.25, 0.5, 0.25, 1.0)
    assert out["output_tokens_mean"] == 200.0
    assert out["ttft_attainment"] == pytest.approx(2 / 3)
    assert out["tpot_attainment"] == 0.5
    assert out["rejected_120s"] == 1.0
    assert all(out[k] == 1.0 for k in ("lengths_valid", "output_valid", "ttft_valid", "tpot_valid"))
    without = DoorMeter(None, None)
    without.first_token(S, 1.0)
    without.finished(S, 10, 0.01)
    out = without.reading(2 * S)
    assert (out["ttft_valid"], out["tpot_valid"], out["output_valid"]) == (0.0, 0.0, 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 400 * S), st.integers(1, 200_000)), max_size=60),
    st.integers(0, 420),
)
def test_windows_equal_a_count_over_the_events(events: list[tuple[int, int]], now_s: int) -> None:
    """The ring of seconds against the plain definition, at any whole second up to a little after the last event."""
    events = sorted((t, n) for t, n in events if t < now_s * S)
    door = DoorMeter(None, None)
    for t, n in events:
        door.arrival(t, n, n)
    out = door.reading(now_s * S)
    for window in (5, 30, 120):
        inside = [n for t, n in events if t >= (now_s - window) * S]
        seconds = max(min(window, now_s), 1)
        assert out[f"arrival_rate_{window}s_rps"] == pytest.approx(len(inside) / seconds)
        assert out[f"input_token_rate_{window}s_tps"] == pytest.approx(sum(inside) / seconds)
    assert door.recent_lengths().tolist() == [n for _, n in events][-RECENT_LENGTHS:]


# ------------------------------------------------------------------ the link


def test_utilisation_by_hand() -> None:
    meter = LinkMeter(100.0)
    meter.advance(int(1.5 * S), 40.0, False)
    meter.advance(4 * S, 0.0, False)
    assert meter.reading(S)["utilisation_5s"] == pytest.approx(0.4)
    assert meter.reading(2 * S)["utilisation_5s"] == pytest.approx(60 / 2 / 100)
    out = meter.reading(4 * S)
    assert out["utilisation_5s"] == out["utilisation_30s"] == pytest.approx(60 / 4 / 100)
    meter.advance(6 * S, 0.0, False)
    assert meter.reading(6 * S)["utilisation_5s"] == pytest.approx(20 / 5 / 100)
    assert meter.reading(6 * S)["utilisation_30s"] == pytest.approx(60 / 6 / 100)
    assert meter.peak_bps == pytest.approx(40.0)


def test_observed_capacity_follows_the_wire() -> None:
    """Nominal without evidence; the delivered rate over 5 s of backlog throughout; any faster delivery raises it."""
    meter = LinkMeter(100.0)
    assert (meter.observed_bps, meter.reading(0)["observed_valid"]) == (100.0, 0.0)
    meter.advance(20 * S, 30.0, False)  # not the limit: no evidence
    assert (meter.observed_bps, meter.reading(20 * S)["observed_valid"]) == (100.0, 0.0)
    meter.advance(24 * S, 20.0, True)
    assert meter.observed_bps == 100.0  # four seconds of backlog are not enough
    meter.advance(25 * S, 20.0, True)
    out = meter.reading(25 * S)
    assert (out["observed_capacity_bps"], out["observed_valid"], out["observed_age_s"]) == (20.0, 1.0, 0.0)
    meter.advance(30 * S, 50.0, False)  # faster than believed, though nothing waited
    assert meter.observed_bps == pytest.approx(50.0)
    assert meter.reading(34 * S)["observed_age_s"] == 4.0
    meter.advance(34 * S, 0.0, False)
    meter.advance(38 * S, 10.0, True)
    assert meter.observed_bps == pytest.approx(50.0)
    meter.advance(39 * S, 10.0, True)
    assert meter.observed_bps == pytest.approx(10.0)


def test_observed_capacity_recovers_after_a_minute() -> None:
    meter = LinkMeter(100.0)
    meter.advance(5 * S, 60.0, True)
    assert meter.observed_bps == pytest.approx(60.0)
    seen = {}
    for second in range(6, 120):
        meter.advance(second * S, 0.0, False)
        seen[second] = meter.observed_bps
    assert seen[64] == pytest.approx(60.0)
    assert seen[65] == seen[69] == pytest.approx(66.0)
    assert seen[70] == pytest.approx(72.6)
    assert seen[90] == seen[119] == 100.0  # 60 x 1.1^6 is above nominal
    assert meter.reading(119 * S)["observed_age_s"] == 114.0


def test_an_outage_is_seen_and_can_be_left() -> None:
    meter = LinkMeter(100.0)
    meter.advance(10 * S, 0.0, True)  # backlog and nothing delivered
    assert meter.observed_bps == pytest.approx(1.0)  # 1% of nominal at least, so that it can grow again
    meter.advance(15 * S, 100.0, True)
    assert meter.observed_bps == pytest.approx(100.0)


@given(
    st.lists(st.tuples(st.integers(1, 7 * S), st.floats(0, 200), st.booleans()), min_size=1, max_size=30),
    st.lists(st.integers(0, 200 * S), max_size=20),
)
def test_reading_a_link_changes_nothing(pieces: list[tuple[int, float, bool]], reads: list[int]) -> None:
    """Telemetry between events leaves every later figure as it is, bit for bit."""
    quiet, read = LinkMeter(100.0), LinkMeter(100.0)
    now = 0
    for span, rate, congested in pieces:
        for at in sorted(r for r in reads if now < r <= now + span):
            read.advance_for_reading(at, rate, congested)
            read.reading(at)
        now += span
        quiet.advance(now, rate, congested)
        read.advance(now, rate, congested)
    assert np.array_equal(quiet.state, read.state)
    assert np.array_equal(quiet.table, read.table)
    assert quiet.reading(now) == read.reading(now)
    assert 1.0 <= quiet.observed_bps <= 100.0


# ------------------------------------------------------------------ no oracle

ENGINE = pytest.mark.parametrize("engine", ENGINES)


def observations(
    world: World, engine: str, ticks: int, decide: Any = lambda k: Decision.same(1, threshold_tokens=10_000.0)
) -> tuple[list[np.ndarray[Any, Any]], Engine]:
    """Raw telemetry (finer than the float32 observation) at the first `ticks` whole seconds."""
    run = make_engine(engine, world)
    out = []
    for k in range(ticks):
        run.run_until(k * S)
        telemetry = run.telemetry()
        lengths = telemetry.recent_lengths_tokens[0]
        out.append(np.concatenate([telemetry.values, np.ravel(telemetry.legal_moves), lengths]))
        run.apply(decide(k))
    return out, run


def first_difference(a: list[np.ndarray[Any, Any]], b: list[np.ndarray[Any, Any]]) -> int | None:
    """First tick at which two worlds look different."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if not np.array_equal(x, y)), None)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario("paper", overrides=["measure.horizon_s=120", "slo.ttft_s=5"])


def convert(k: int) -> Decision:
    """Thresholds and conversions that keep everything moving."""
    return Decision.same(1, threshold_tokens=5_000.0 * (1 + k % 7), move=Move(k // 15 % 3))


@ENGINE
@pytest.mark.parametrize("at_s", [0, 30, 61])
def test_future_arrivals_do_not_show(scenario: Scenario, engine: str, at_s: int) -> None:
    world, other = draw_world(scenario, 1), draw_world(scenario.with_rate(4.0), 2)
    cut = int(np.searchsorted(world.requests.arrival_ns, at_s * S))
    theirs = int(np.searchsorted(other.requests.arrival_ns, at_s * S))
    n = len(world.requests)
    joined = dataclasses.replace(
        world.requests,
        **{
            name: np.concatenate(
                [getattr(world.requests, name)[:cut], getattr(other.requests, name)[theirs:]]
            )
            for name in ("arrival_ns", "input_tokens", "output_tokens", "session")
        },
        block_offsets=np.zeros(cut + len(other.requests) - theirs + 1, dtype=np.int64),
    )
    changed = dataclasses.replace(world, requests=joined, pd_of=np.zeros(len(joined), dtype=np.int64))
    assert len(joined) != n
    a, _ = observations(world, engine, 90, convert)
    b, _ = observations(changed, engine, 90, convert)
    differs = first_difference(a, b)
    assert differs is not None, "the worlds are not different at all"
    assert differs > at_s


@ENGINE
def test_output_lengths_of_unfinished_requests_do_not_show(scenario: Scenario, engine: str) -> None:
    world = draw_world(scenario, 3)
    a, run = observations(world, engine, 120, convert)
    finish_ns = run.records.finish_ns
    done = np.flatnonzero(finish_ns != NEVER_NS)
    assert len(done) > 50
    for request in (int(done[0]), int(done[len(done) // 2]), int(done[-1])):
        longer = world.requests.output_tokens.copy()
        longer[request] *= 20
        table = dataclasses.replace(world.requests, output_tokens=longer)
        b, _ = observations(dataclasses.replace(world, requests=table), engine, 120, convert)
        differs = first_difference(a, b)
        # the first tick after its finish: a finish at a tick follows that tick's reading
        assert differs == finish_ns[request] // S + 1 or differs is None


@ENGINE
def test_capacity_of_a_link_that_nobody_uses_does_not_show(scenario: Scenario, engine: str) -> None:
    """Until 40 s everything stays local; the link is a tenth of nominal, or gone, for the first 30 s."""

    def decide(k: int) -> Decision:
        return Decision.same(1, threshold_tokens=math.inf if k < 40 else 0.0)

    world = draw_world(scenario, 4)
    a, _ = observations(world, engine, 90, decide)
    for capacity_bps in (10e9, 0.0):
        slow = CapacityTrace(np.array([0, 30 * S]), np.array([capacity_bps, 100e9]))
        b, _ = observations(dataclasses.replace(world, links=(slow,)), engine, 90, decide)
        assert first_difference(a, b) is None
    # and one that stays slow shows, but not before the first flow
    slow = CapacityTrace(np.array([0]), np.array([1e9]))
    b, run = observations(dataclasses.replace(world, links=(slow,)), engine, 90, decide)
    differs = first_difference(a, b)
    assert differs is not None
    assert differs > first_flow_ns(run) / S > 40


def first_flow_ns(run: Engine) -> int:
    """Instant at which the first KV cache began to cross the link."""
    records = run.records
    remote = (records.route == Route.REMOTE) & (records.prefill_start_ns != NEVER_NS)
    start = records.prefill_start_ns[remote]
    layers = run.world.scenario.model.kv.n_layers
    return min(
        s + pipelined_open_ns(e - s, layers)
        for s, e in zip(start.tolist(), records.prefill_end_ns[remote].tolist(), strict=True)
    )


@ENGINE
@pytest.mark.parametrize("margin_s", [-math.inf, 0.0])
def test_true_capacity_shows_only_through_what_was_sent(
    scenario: Scenario, engine: str, margin_s: float
) -> None:
    world = draw_world(scenario, 5)

    def decide(k: int) -> Decision:
        return Decision.same(1, margin_s=margin_s)

    slow = CapacityTrace(np.array([0]), np.array([0.2e9]))
    a, run = observations(world, engine, 60, decide)
    b, _ = observations(dataclasses.replace(world, links=(slow,)), engine, 60, decide)
    differs = first_difference(a, b)
    assert differs is not None
    assert differs > first_flow_ns(run) / S


def test_no_field_is_named_after_what_a_router_cannot_know() -> None:
    forbidden = re.compile("true|future|remaining_output|remaining_tokens|next_arrival")
    assert not [n for n in SCHEMA.names if forbidden.search(n)]
