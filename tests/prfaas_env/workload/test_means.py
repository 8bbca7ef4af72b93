import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.means import input_law, mean_output_tokens, mean_rate_rps, output_law
from prfaas_env.workload.models import (
    FixedLengths,
    LogNormalLengths,
    PoissonArrivals,
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
MOONCAKE = TraceWorkload(file="bundled:mooncake_conversation_first_32min", format="mooncake")


def test_synthetic():
    assert mean_rate_rps(PAPER) == 2.5
    assert input_law(PAPER).mean == pytest.approx(27_486, abs=1)
    assert mean_output_tokens(PAPER) == 1024
    chain = RegimeChain(values=(1.0, 4.0), probabilities=(0.25, 0.75), mean_holding_s=10.0)
    assert mean_rate_rps(PAPER.model_copy(update={"arrivals": RegimeArrivals(rate_rps=chain)})) == 3.25


def test_trace():
    assert mean_rate_rps(MOONCAKE) == pytest.approx(6_151 / 1_922.999)
    assert input_law(MOONCAKE).mean == pytest.approx(12_782, abs=1)
    assert input_law(MOONCAKE).survival(19_400) == pytest.approx(0.1905, abs=1e-4)
    assert mean_output_tokens(MOONCAKE) == pytest.approx(347, abs=1)
    assert output_law(MOONCAKE).quantile(1.0) == 2_000


def test_trace_slice_and_speed():
    part = MOONCAKE.model_copy(update={"start_s": 300.0, "end_s": 900.0, "speed": 2.0})
    table = generate_requests(part, seed=0)
    assert mean_rate_rps(part) == pytest.approx(len(table) / 300.0)
    assert input_law(part).mean == pytest.approx(table.input_tokens.mean())
    t = np.array([1_000, 19_400])
    assert input_law(part).survival(t) == pytest.approx([(table.input_tokens > x).mean() for x in t])


def test_slices_without_requests_or_time(tmp_path):
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00,1,1\n"
    (tmp_path / "one.csv").write_text(head)
    with pytest.raises(PrfaasError, match="spans 0 s"):
        mean_rate_rps(TraceWorkload(file="one.csv", format="azure"), tmp_path)
    (tmp_path / "two.csv").write_text(head + "2023-11-16 00:10:00,1,1\n")
    gap = TraceWorkload(file="two.csv", format="azure", start_s=10.0, end_s=20.0)
    assert mean_rate_rps(gap, tmp_path) == 0.0
    for law in (input_law, output_law):
        with pytest.raises(PrfaasError, match="holds no requests"):
            law(gap, tmp_path)
