"""Hit rates for workloads without prefix data."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.hits import draw_cached_tokens
from prfaas_env.workload.models import Fractions, HitRate, TraceWorkload, Workload
from prfaas_env.workload.requests import RequestTable

AZURE = {"kind": "trace", "file": "bundled:azure_llm_2023_conv", "format": "azure"}
HALF = {"share": 0.5, "cached_fraction": {"kind": "fixed", "fraction": 0.75}}
SYNTHETIC = {
    "kind": "synthetic",
    "arrivals": {"kind": "poisson", "rate_rps": 5},
    "input_tokens": {"kind": "lognormal", "mu": 8, "sigma": 1, "min_tokens": 1, "max_tokens": 50_000},
    "output_tokens": {"kind": "fixed", "tokens": 9},
}


def _workload(**fields):
    return TypeAdapter(Workload).validate_python(fields)


def test_by_hand():
    """Half hit, with three quarters of their input, rounded down and never all of it."""
    length = np.array([1000, 1001, 3, 1] * 500, dtype=np.int64)
    cached = draw_cached_tokens(HitRate.model_validate(HALF), length, seed=0)
    hit = cached[length == 1000] > 0
    assert 200 < hit.sum() < 300
    assert set(cached[length == 1000].tolist()) == {0, 750}
    assert set(cached[length == 1001].tolist()) == {0, 750}  # 750.75
    assert set(cached[length == 3].tolist()) == {0, 2}
    assert set(cached[length == 1].tolist()) == {0}
    everything = HitRate.model_validate({"share": 1, "cached_fraction": {"kind": "fixed", "fraction": 1}})
    assert np.array_equal(draw_cached_tokens(everything, length, seed=0), length - 1)
    assert draw_cached_tokens(None, length, seed=0).tolist() == [0] * 2000


@pytest.mark.parametrize(
    ("law", "mean", "std"),
    [
        ({"kind": "fixed", "fraction": 0.3}, 0.3, 0.0),
        ({"kind": "uniform"}, 0.5, 12**-0.5),
        ({"kind": "uniform", "low": 0.2, "high": 0.6}, 0.4, 0.4 * 12**-0.5),
        ({"kind": "beta", "alpha": 2, "beta": 6}, 0.25, (12 / (64 * 9)) ** 0.5),
    ],
)
def test_laws_of_the_fraction(law, mean, std):
    length = np.full(40_000, 1_000_000, dtype=np.int64)
    hit_rate = HitRate.model_validate({"share": 1.0, "cached_fraction": law})
    fraction = draw_cached_tokens(hit_rate, length, seed=3) / length
    assert fraction.mean() == pytest.approx(mean, abs=0.005)
    assert fraction.std() == pytest.approx(std, abs=0.005)


@given(
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
    law=st.sampled_from(
        [{"kind": "fixed", "fraction": 1}, {"kind": "uniform"}, {"kind": "beta", "alpha": 0.3, "beta": 0.2}]
    ),
    length=st.lists(st.integers(1, 200_000), max_size=50),
)
@settings(max_examples=80, deadline=None)
def test_cached_tokens_are_below_the_input(seed, share, law, length):
    TypeAdapter(Fractions).validate_python(law)
    tokens = np.array(length, dtype=np.int64)
    cached = draw_cached_tokens(HitRate(share=share, cached_fraction=law), tokens, seed)
    assert cached.dtype == np.int64
    assert cached.shape == tokens.shape
    assert np.all((cached >= 0) & (cached < np.maximum(tokens, 1)))


def test_an_azure_trace_with_a_hit_rate():
    """A trace without ids is labelled, and a stated hit rate can be applied; nothing else changes."""
    plain = generate_requests(_workload(**AZURE), seed=1)
    assert not plain.cached_tokens.any()
    assert "no prefix data: every prompt counts as new" in plain.notes
    table = generate_requests(_workload(**AZURE, hit_rate=HALF), seed=1)
    hits = table.cached_tokens > 0
    assert hits.mean() == pytest.approx(0.5, abs=0.02)
    assert np.array_equal(table.cached_tokens[hits], (table.input_tokens[hits] * 0.75).astype(np.int64))
    assert any(
        note.startswith("no prefix data; hit rate as stated: 50.0% of the requests") for note in table.notes
    )
    for name in ("arrival_ns", "input_tokens", "output_tokens", "block_ids"):
        assert np.array_equal(getattr(table, name), getattr(plain, name))


def test_a_request_keeps_its_hit_whatever_the_slice():
    whole = generate_requests(_workload(**AZURE, hit_rate=HALF), seed=4)
    part = generate_requests(_workload(**AZURE, hit_rate=HALF, start_s=600, end_s=900), seed=4)
    first = int(np.searchsorted(whole.arrival_ns, 600 * 10**9))
    assert first > 1_000
    assert np.array_equal(part.cached_tokens, whole.cached_tokens[first : first + len(part)])


def test_synthetic_workloads():
    plain = generate_requests(_workload(**SYNTHETIC), seed=2, n_requests=4_000)
    assert plain.notes == ("no prefix data: every prompt counts as new",)
    assert not plain.cached_tokens.any()
    table = generate_requests(_workload(**SYNTHETIC, hit_rate=HALF), seed=2, n_requests=4_000)
    assert (table.cached_tokens > 0).mean() == pytest.approx(0.5, abs=0.03)
    assert np.array_equal(table.input_tokens, plain.input_tokens)
    assert np.array_equal(table.arrival_ns, plain.arrival_ns)
    short = generate_requests(_workload(**SYNTHETIC, hit_rate=HALF), seed=2, n_requests=100)
    assert np.array_equal(short.cached_tokens, table.cached_tokens[:100])
    # Who hits and how much are drawn apart.
    less = HALF | {"cached_fraction": {"kind": "uniform", "low": 0.1, "high": 0.2}}
    other = generate_requests(_workload(**SYNTHETIC, hit_rate=less), seed=2, n_requests=4_000)
    long = table.input_tokens > 20
    assert np.array_equal((other.cached_tokens > 0)[long], (table.cached_tokens > 0)[long])
    order = np.arange(4_000)[::-1].copy()
    assert np.array_equal(table.take(order).cached_tokens, table.cached_tokens[::-1])


def test_a_workload_with_ids_refuses_it(tmp_path):
    with pytest.raises(
        PrfaasError,
        match=r"^hit_rate does not apply to bundled:moon.*, which has prefix ids \(blocks of 512 tokens\); leave it",
    ):
        generate_requests(
            _workload(
                kind="trace",
                file="bundled:mooncake_conversation_first_32min",
                format="mooncake",
                hit_rate=HALF,
            ),
            seed=0,
        )
    # The same format without ids takes it.
    row = {"timestamp": 0, "input_length": 100, "output_length": 5}
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row | {"timestamp": k}) + "\n" for k in range(50)))
    workload = TraceWorkload(file="t.jsonl", format="mooncake", hit_rate=HALF)
    table = generate_requests(workload, seed=0, base_dir=tmp_path)
    assert set(table.cached_tokens.tolist()) == {0, 75}


@pytest.mark.parametrize(
    ("hit_rate", "message"),
    [
        ({"share": 1.5, "cached_fraction": {"kind": "uniform"}}, "share"),
        ({"share": 0.5}, "cached_fraction"),
        ({"share": 0.5, "cached_fraction": 0.3}, "cached_fraction"),
        ({"share": 0.5, "cached_fraction": {"kind": "fixed", "fraction": 1.1}}, "fraction"),
        (
            {"share": 0.5, "cached_fraction": {"kind": "uniform", "low": 0.5, "high": 0.4}},
            "must not be below",
        ),
        ({"share": 0.5, "cached_fraction": {"kind": "beta", "alpha": 0, "beta": 1}}, "alpha"),
    ],
)
def test_settings_that_make_no_sense_are_refused(hit_rate, message):
    with pytest.raises(ValidationError, match=message):
        _workload(**SYNTHETIC, hit_rate=hit_rate)


def test_a_table_has_one_figure_per_request():
    zeros = np.zeros(3, dtype=np.int64)
    assert RequestTable.without_prefixes(zeros, zeros, zeros).cached_tokens.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="2 cached_tokens for 3 requests"):
        RequestTable.without_prefixes(zeros, zeros, zeros, cached_tokens=zeros[:2] + 1)
