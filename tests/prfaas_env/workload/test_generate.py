import hashlib
import subprocess
import sys

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.models import (
    FixedLengths,
    GammaArrivals,
    LogNormalLengths,
    PoissonArrivals,
    PoissonLengths,
    RegimeArrivals,
    RegimeChain,
    SyntheticWorkload,
    TraceWorkload,
)

PAPER = SyntheticWorkload(
    arrivals=PoissonArrivals(rate_rps=2.5),
    input_tokens=LogNormalLengths(mu=9.90, sigma=1.00, min_tokens=128, max_tokens=131_072),
    output_tokens=FixedLengths(tokens=1024),
)
DRIFT = SyntheticWorkload(
    arrivals=RegimeArrivals(
        rate_rps=RegimeChain(values=(1.2, 1.9, 2.6), probabilities=(0.25, 0.5, 0.25), mean_holding_s=120)
    ),
    input_tokens=LogNormalLengths(
        mu=RegimeChain(values=(9.4, 9.9, 10.2), probabilities=(0.3, 0.5, 0.2), mean_holding_s=300),
        sigma=1.0,
        min_tokens=128,
        max_tokens=131_072,
    ),
    output_tokens=PoissonLengths(
        mean_tokens=RegimeChain(
            values=(400, 1024, 1800), probabilities=(0.35, 0.40, 0.25), mean_holding_s=400
        )
    ),
)
MOONCAKE = TraceWorkload(file="bundled:mooncake_conversation_first_32min", format="mooncake")
WORKLOADS = [PAPER, DRIFT, MOONCAKE]
NAMES = ["paper", "drift", "mooncake"]
ARRAYS = ("arrival_ns", "input_tokens", "output_tokens", "session", "block_offsets", "block_ids")


def _digest(table):
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(getattr(table, name).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("workload", WORKLOADS, ids=NAMES)
def test_table_is_well_formed(workload):
    table = generate_requests(workload, seed=3, horizon_s=600.0)
    n = len(table)
    assert n > 500
    for name in ARRAYS:
        array = getattr(table, name)
        assert array.dtype == np.int64
        # Engines compile for plain arrays: writeable, contiguous, their own.
        assert array.flags.writeable
        assert array.flags.c_contiguous
    assert table.input_tokens.shape == table.output_tokens.shape == table.session.shape == (n,)
    assert np.all(np.diff(table.arrival_ns) >= 0)
    assert table.arrival_ns[0] >= 0
    assert table.arrival_ns[-1] < 600_000_000_000
    assert table.input_tokens.min() >= 1
    assert table.output_tokens.min() >= 1
    assert table.block_offsets.shape == (n + 1,)
    assert table.block_offsets[0] == 0
    assert table.block_offsets[-1] == len(table.block_ids)


@pytest.mark.parametrize("workload", WORKLOADS, ids=NAMES)
def test_the_seed_gives_the_table(workload):
    one = _digest(generate_requests(workload, seed=1, horizon_s=300.0))
    assert _digest(generate_requests(workload, seed=1, horizon_s=300.0)) == one
    assert (
        len({one, *(_digest(generate_requests(workload, seed=s, horizon_s=300.0)) for s in (2, 3, 4))}) == 4
    )


def test_another_process_draws_the_same():
    code = (
        "import sys, hashlib; sys.path.insert(0, 'tests/prfaas_env/workload')\n"
        "from test_generate import DRIFT, _digest, generate_requests\n"
        "print(*[_digest(generate_requests(DRIFT, seed=s, horizon_s=900.0)) for s in (5, 6, 7)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_root()
    )
    here = [_digest(generate_requests(DRIFT, seed=s, horizon_s=900.0)) for s in (5, 6, 7)]
    assert done.stdout.split() == here


def _root():
    from pathlib import Path

    return Path(__file__).parents[3]


def test_global_random_state_is_neither_read_nor_moved():
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one = _digest(generate_requests(DRIFT, seed=1, horizon_s=300.0))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert _digest(generate_requests(DRIFT, seed=1, horizon_s=300.0)) == one


@pytest.mark.parametrize("base", [PAPER, DRIFT], ids=NAMES[:2])
def test_streams_are_independent(base):
    table = generate_requests(base, seed=8, n_requests=400)
    # Another input law: arrivals and outputs stay.
    other = generate_requests(
        base.model_copy(update={"input_tokens": FixedLengths(tokens=7)}), seed=8, n_requests=400
    )
    assert np.array_equal(other.arrival_ns, table.arrival_ns)
    assert np.array_equal(other.output_tokens, table.output_tokens)
    # Another output law: arrivals and inputs stay.
    other = generate_requests(
        base.model_copy(update={"output_tokens": PoissonLengths(mean_tokens=99)}), seed=8, n_requests=400
    )
    assert np.array_equal(other.arrival_ns, table.arrival_ns)
    assert np.array_equal(other.input_tokens, table.input_tokens)
    # Another arrival law: plain lengths stay with their request (regimes follow the instant).
    other = generate_requests(
        base.model_copy(update={"arrivals": GammaArrivals(rate_rps=9.0, shape=0.5)}), seed=8, n_requests=400
    )
    assert not np.array_equal(other.arrival_ns, table.arrival_ns)
    if base is PAPER:
        assert np.array_equal(other.input_tokens, table.input_tokens)


def test_arrivals_and_lengths_are_not_correlated():
    table = generate_requests(PAPER, seed=0, n_requests=100_000)
    gaps = np.diff(table.arrival_ns, prepend=0)
    both = PAPER.model_copy(update={"output_tokens": PAPER.input_tokens})
    outputs = generate_requests(both, seed=0, n_requests=100_000).output_tokens
    for a, b in ((gaps, table.input_tokens), (gaps, outputs), (table.input_tokens, outputs)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.015


def test_longer_horizon_begins_with_the_shorter_one():
    short = generate_requests(DRIFT, seed=4, horizon_s=500.0)
    long = generate_requests(DRIFT, seed=4, horizon_s=5_000.0)
    for name in ("arrival_ns", "input_tokens", "output_tokens"):
        assert np.array_equal(getattr(long, name)[: len(short)], getattr(short, name))


@pytest.mark.parametrize("workload", WORKLOADS, ids=NAMES)
def test_empty_tables(workload):
    for limit in ({"horizon_s": 0.0}, {"n_requests": 0}):
        table = generate_requests(workload, seed=0, **limit)
        assert len(table) == 0
        assert table.block_offsets.tolist() == [0]


def test_synthetic_needs_a_limit():
    with pytest.raises(PrfaasError, match="horizon_s or n_requests"):
        generate_requests(PAPER, seed=0)
