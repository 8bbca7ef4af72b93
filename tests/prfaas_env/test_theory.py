"""The throughput model against the paper, hand-computed points, brute force and laws."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env import theory
from prfaas_env.base import PrfaasError
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, PrefillPolynomial, PrefillTable
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.theory import THRESHOLDS_TOKENS, Optimum, capacity, cheapest, plan, search
from prfaas_env.workload.laws import LengthLaw, empirical_law
from prfaas_env.workload.means import input_law


@cache
def paper_law() -> LengthLaw:
    return input_law(load_scenario("paper").workload)


@cache
def paper_case() -> dict[str, Any]:
    """The case study (paper section 4) as arguments of `search`."""
    model = load_scenario("paper").model
    return {
        "remote": model.hardware["h200"].prefill,
        "local": model.hardware["h20"].prefill,
        "decode": model.hardware["h20"].decode,
        "kv": model.kv,
        "n_prfaas": 4,
        "n_local": 8,
        "link_bps": 100e9,
        "output_tokens_mean": 1024.0,
    }


def paper_search(**changes: Any) -> Optimum:
    return search(paper_law(), **{**paper_case(), **changes})


def paper_point(threshold_tokens: float, n_prefill: int, **changes: Any) -> Optimum:
    changes = {**paper_case(), **changes}
    return capacity(paper_law(), threshold_tokens=threshold_tokens, n_prefill=n_prefill, **changes)


def faster(profile: PrefillTable, factor: float) -> PrefillTable:
    return profile.model_copy(update={"seconds_at": tuple(s / factor for s in profile.seconds_at)})


class TestEquations:
    """Round numbers by hand."""

    def test_1_kv_rate(self) -> None:
        assert theory.kv_rate_bps(8e9, 2.0) == 4e9
        # Table 5 at 32K: 701.3 MiB in 1.84 s is 3.19 Gbps.
        assert theory.kv_rate_bps(701.3 * 2**20 * 8, 1.84) == pytest.approx(3.19e9, rel=0.005)

    def test_2_min_egress(self) -> None:
        assert theory.min_egress_bps(3, 8e9, 2.0) == 12e9
        # Section 2.3: 512 H200, 8 per instance, MiniMax-M2.5 at 59.93 Gbps each: 3.8 Tbps.
        assert theory.min_egress_bps(512 / 8, 59.93e9, 1.0) == pytest.approx(3.8e12, rel=0.02)

    def test_3_prfaas_is_limited_by_prefill_or_link(self) -> None:
        link = np.array([1e9, 4e9, 100e9])
        assert theory.theta_prfaas_rps(4, 2.0, link, 2e9) == pytest.approx([0.5, 2.0, 2.0])

    def test_4_and_5(self) -> None:
        assert theory.theta_pdp_rps(np.array([1, 3]), 1.5) == pytest.approx([2 / 3, 2.0])
        assert theory.theta_pdd_rps(5, 20, 0.025, 1024) == pytest.approx(3.90625)

    def test_6_takes_each_path_by_its_share(self) -> None:
        # 3 / 0.25 = 12, 3 / 0.75 = 4.
        assert theory.lambda_max_rps(3.0, 3.0, 100.0, 0.25) == 4.0
        assert theory.lambda_max_rps(3.0, 3.0, 100.0, 0.75) == 4.0
        assert theory.lambda_max_rps(1.0, 9.0, 100.0, 0.25) == 4.0
        assert theory.lambda_max_rps(3.0, 3.0, 2.0, 0.25) == 2.0

    def test_6_forgets_a_path_without_requests(self) -> None:
        assert theory.lambda_max_rps(0.0, 3.0, 100.0, 0.0) == 3.0
        assert theory.lambda_max_rps(3.0, 0.0, 100.0, 1.0) == 3.0

    def test_7_and_8_are_differences(self) -> None:
        assert theory.prefill_gap_rps(3.0, 3.0, 0.25) == 8.0
        assert theory.prefill_gap_rps(1.0, 3.0, 0.25) == 0.0
        assert theory.stage_gap_rps(1.0, 3.0, np.array([3.0, 4.0, 6.0])) == pytest.approx([1.0, 0.0, -2.0])

    def test_all_hold_at_the_papers_optimum(self) -> None:
        best = paper_search()
        terms = (best.theta_prfaas_rps, best.theta_pdp_rps)
        assert abs(theory.prefill_gap_rps(*terms, best.offload_share)) < 0.02
        assert theory.stage_gap_rps(*terms, best.theta_pdd_rps) == pytest.approx(-0.656, abs=0.01)

    def test_broadcast(self) -> None:
        assert theory.lambda_max_rps(np.ones((3, 1)), np.ones((1, 4)), 9.0, 0.5).shape == (3, 4)


class TestPaper:
    """Tables 5 and 6, figure 5 and the sensitivities, with the back-solved profiles."""

    def test_law_at_the_threshold(self) -> None:
        law = paper_law()
        assert law.survival(19_400) == pytest.approx(0.4957, rel=0.002)
        assert law.mean_above(19_400) == pytest.approx(45_046, rel=0.002)
        assert law.mean_below(19_400) == pytest.approx(10_224, rel=0.002)

    def test_optimum(self) -> None:
        best = plan(load_scenario("paper"))["prfaas"]
        assert abs(best.threshold_tokens - 19_400) <= 100
        assert (best.n_prfaas, best.n_prefill, best.n_decode) == (4, 3, 5)
        assert best.lambda_max_rps == pytest.approx(3.24, rel=0.005)
        assert best.theta_prfaas_rps == pytest.approx(1.61, rel=0.005)
        assert best.theta_pdp_rps == pytest.approx(1.64, rel=0.005)
        assert best.theta_pdd_rps == pytest.approx(3.91, rel=0.005)
        assert best.offload_share == pytest.approx(0.496, abs=0.001)
        assert best.egress_bps == pytest.approx(12.4e9, rel=0.02)

    def test_baselines(self) -> None:
        found = plan(load_scenario("paper"))
        assert list(found) == ["prfaas", "homogeneous", "naive"]
        homogeneous, naive = found["homogeneous"], found["naive"]
        assert (homogeneous.n_prfaas, homogeneous.n_prefill, homogeneous.n_decode) == (0, 9, 3)
        assert homogeneous.threshold_tokens == math.inf
        assert homogeneous.lambda_max_rps == pytest.approx(2.11, rel=0.005)
        assert homogeneous.theta_pdd_rps == pytest.approx(2.35, rel=0.005)
        assert (homogeneous.egress_bps, homogeneous.theta_prfaas_rps, homogeneous.offload_share) == (0, 0, 0)
        assert (naive.n_prfaas, naive.n_prefill, naive.n_decode) == (4, 0, 8)
        assert naive.threshold_tokens == 0
        assert naive.lambda_max_rps == pytest.approx(2.45, rel=0.005)
        assert naive.theta_pdd_rps == pytest.approx(6.25, rel=0.005)
        assert (naive.theta_pdp_rps, naive.offload_share) == (0, 1)

    def test_true_means(self) -> None:
        found = plan(load_scenario("paper"), means="service")
        assert found["prfaas"].lambda_max_rps == pytest.approx(3.15, rel=0.01)
        assert abs(found["prfaas"].threshold_tokens - 19_800) <= 100
        assert found["homogeneous"].lambda_max_rps == pytest.approx(2.02, rel=0.01)
        assert found["naive"].lambda_max_rps == pytest.approx(2.36, rel=0.01)
        assert paper_point(19_400, 3, means="service").lambda_max_rps == pytest.approx(3.13, rel=0.01)

    def test_service_ttft(self) -> None:
        found = plan(load_scenario("paper"))
        for name, mean_s, p90_s in (
            ("prfaas", 2.22, 3.51),
            ("homogeneous", 4.44, 9.73),
            ("naive", 1.74, 3.51),
        ):
            assert found[name].service_ttft_mean_s == pytest.approx(mean_s, rel=0.03)
            assert found[name].service_ttft_p90_s == pytest.approx(p90_s, rel=0.01)

    @pytest.mark.parametrize(
        ("n_prefill", "rate"), [(1, 1.08), (2, 2.17), (3, 3.25), (4, 3.13), (5, 2.34), (6, 1.56), (7, 0.78)]
    )
    def test_figure_5_split(self, n_prefill: int, rate: float) -> None:
        point = paper_point(19_400, n_prefill)
        assert point.lambda_max_rps == pytest.approx(rate, abs=0.0051)
        assert point.n_decode == 8 - n_prefill

    @pytest.mark.parametrize(
        ("threshold", "rate", "gbps"),
        [
            (1_000, 2.45, 12.9),
            (5_000, 2.52, 12.8),
            (10_000, 2.71, 12.7),
            (15_000, 2.97, 12.5),
            (18_000, 3.16, 12.4),
            (19_400, 3.25, 12.4),
            (21_000, 2.92, 10.7),
            (25_000, 2.35, 7.8),
            (30_000, 1.90, 5.7),
            (40_000, 1.43, 3.3),
            (60_000, 1.03, 1.5),
        ],
    )
    def test_figure_5_threshold(self, threshold: float, rate: float, gbps: float) -> None:
        point = paper_point(threshold, 3)
        assert point.lambda_max_rps == pytest.approx(rate, rel=0.005)
        assert point.egress_bps / 1e9 == pytest.approx(gbps, abs=0.06)

    def test_re_optimised_per_split(self) -> None:
        two = paper_search(splits=(2,))
        assert two.lambda_max_rps == pytest.approx(2.998, abs=0.001)
        assert two.threshold_tokens == pytest.approx(15_500, abs=100)
        # Four prefill instances: decode is the limit over a range of thresholds that ends near 24.9K.
        assert paper_point(24_900, 4).lambda_max_rps == paper_search(splits=(4,)).theta_pdd_rps
        assert paper_point(25_500, 4).lambda_max_rps < 0.999 * 3.125

    @pytest.mark.parametrize(
        ("gbps", "rate", "threshold", "n_prefill"),
        [(12, 3.17, None, None), (10, 3.03, 25_600, 4), (8, 2.63, 29_000, 4), (5, 2.26, 42_000, 5)],
    )
    def test_thin_links(
        self, gbps: float, rate: float, threshold: float | None, n_prefill: int | None
    ) -> None:
        best = paper_search(link_bps=gbps * 1e9)
        assert best.lambda_max_rps == pytest.approx(rate, abs=0.0051)
        if n_prefill is not None:
            assert best.n_prefill == n_prefill
            assert best.threshold_tokens == pytest.approx(threshold, abs=500)
        assert best.egress_bps <= gbps * 1e9 * (1 + 1e-12)

    def test_where_the_link_begins_to_bind(self) -> None:
        free = paper_search().lambda_max_rps
        low, high = 5e9, 100e9
        while high - low > 1e6:
            middle = (low + high) / 2
            bound = paper_search(link_bps=middle).lambda_max_rps < free * (1 - 1e-9)
            low, high = (middle, high) if bound else (low, middle)
        assert high == pytest.approx(12.4e9, rel=0.02)
        assert paper_search(link_bps=13e9) == paper_search(link_bps=100e9)

    @pytest.mark.parametrize(
        ("output_tokens", "rate", "n_prefill", "threshold"),
        [
            (256, 3.89, 6, 29_200),
            (512, 3.67, 5, 26_200),
            (1024, 3.25, 3, 19_400),
            (2048, 2.73, 1, 10_600),
            (4096, 1.37, 1, None),
        ],
    )
    def test_output_length(
        self, output_tokens: float, rate: float, n_prefill: int, threshold: float | None
    ) -> None:
        best = paper_search(output_tokens_mean=output_tokens)
        assert best.lambda_max_rps == pytest.approx(rate, rel=0.003)
        assert best.n_prefill == n_prefill
        if threshold is not None:
            assert abs(best.threshold_tokens - threshold) <= 100

    def test_speed_of_the_remote_instances(self) -> None:
        h200 = paper_case()["remote"]
        twice = paper_search(remote=faster(h200, 2.0))
        assert twice.lambda_max_rps == pytest.approx(5.23, abs=0.0051)
        assert (twice.n_prefill, twice.n_decode) == (1, 7)
        assert twice.threshold_tokens == pytest.approx(7_600, abs=100)
        assert twice.egress_bps == pytest.approx(25.6e9, rel=0.005)
        half = paper_search(remote=faster(h200, 0.5))
        assert half.lambda_max_rps == pytest.approx(2.34, abs=0.0051)
        assert (half.n_prefill, half.n_decode) == (5, 3)
        # Decode is the limit from about 38K to 40K.
        assert half.lambda_max_rps == half.theta_pdd_rps
        assert 38_000 < half.threshold_tokens < 41_000
        assert paper_point(38_000, 5, remote=faster(h200, 0.5)).lambda_max_rps < half.lambda_max_rps
        assert paper_point(38_500, 5, remote=faster(h200, 0.5)).lambda_max_rps == half.lambda_max_rps

    def test_equal_cost(self) -> None:
        """Section 4: about +15% over 128 H20, the same money at a price of 2 to 1."""
        dear = paper_search(n_prfaas=0, remote=None, n_local=16)
        assert (dear.n_prefill, dear.n_decode) == (12, 4)
        assert paper_search().lambda_max_rps / dear.lambda_max_rps == pytest.approx(1.15, abs=0.01)

    def test_the_missing_baseline(self) -> None:
        """4 + 3 prefill instances under plain load balancing, no length rule: 3.15, with true means 3.04."""
        law, h200, h20 = paper_law(), paper_case()["remote"], paper_case()["local"]
        one = theory.theta_pdp_rps(4, h200.seconds_array(law.mean)) + theory.theta_pdp_rps(
            3, h20.seconds_array(law.mean)
        )
        assert one == pytest.approx(3.15, abs=0.0051)
        true = theory.theta_pdp_rps(4, law.expectation(h200.seconds_array)) + theory.theta_pdp_rps(
            3, law.expectation(h20.seconds_array)
        )
        assert true == pytest.approx(3.04, abs=0.0051)


class TestSearch:
    def test_grid(self) -> None:
        assert len(THRESHOLDS_TOKENS) == 1302
        assert THRESHOLDS_TOKENS[[0, 1, -2, -1]].tolist() == [1_000, 1_100, 131_000, 131_072]

    @pytest.mark.parametrize("means", ["representative", "service"])
    def test_hand_computed(self, means: theory.Means) -> None:
        """Lengths 1,000 and 3,000 half each, round profiles: all of the result by hand."""
        best = search(
            empirical_law([1_000, 3_000]),
            remote=PrefillPolynomial(c0_s=0.0, c1_s_per_token=1e-3, source="test"),
            local=PrefillPolynomial(c0_s=1.0, c1_s_per_token=1e-3, source="test"),
            decode=DecodeProfile(a_s=0.1, slots=10, source="test"),
            kv=KVLayout(fixed_bytes=1_000, bytes_per_token=1, n_layers=1),
            n_prfaas=3,
            n_local=3,
            link_bps=16_000.0,
            output_tokens_mean=100.0,
            means=means,
        )
        # Remote: 3 instances at 3 s = 1 req/s; the link carries 16,000 / 32,000 bits = 0.5 req/s.
        # Local: n_prefill / 2 s. Decode: 1 req/s each.
        assert best == Optimum(
            threshold_tokens=1_000.0,
            n_prfaas=3,
            n_prefill=1,
            n_decode=2,
            theta_prfaas_rps=0.5,
            theta_pdp_rps=0.5,
            theta_pdd_rps=2.0,
            lambda_max_rps=1.0,
            egress_bps=16_000.0,
            offload_share=0.5,
            service_ttft_mean_s=2.5,
            service_ttft_p90_s=pytest.approx(3.0, abs=1e-7),
        )

    def test_uneven_shares_are_not_swapped(self) -> None:
        point = capacity(
            empirical_law([1_000, 1_000, 1_000, 3_000]),
            remote=PrefillPolynomial(c0_s=3.0, c1_s_per_token=0.0, source="test"),
            local=PrefillPolynomial(c0_s=1.0, c1_s_per_token=0.0, source="test"),
            decode=DecodeProfile(a_s=0.001, slots=100, source="test"),
            kv=KVLayout(fixed_bytes=125, bytes_per_token=0, n_layers=1),
            n_prfaas=1,
            n_local=5,
            link_bps=1e9,
            output_tokens_mean=10.0,
            threshold_tokens=2_000,
            n_prefill=3,
        )
        # Remote 1/3 over 0.25 = 4/3; local 3 over 0.75 = 4.
        assert point.lambda_max_rps == pytest.approx(4 / 3)
        assert point.offload_share == 0.25
        assert point.egress_bps == pytest.approx(4 / 3 * 0.25 * 1_000)
        assert point.service_ttft_mean_s == pytest.approx(1.5)
        assert point.service_ttft_p90_s == pytest.approx(3.0, abs=1e-7)

    @pytest.mark.parametrize("means", ["representative", "service"])
    def test_equals_the_brute_force_grid(self, means: theory.Means) -> None:
        rng = np.random.default_rng(5)
        law = empirical_law(rng.integers(500, 60_000, 40))
        case = {**paper_case(), "means": means, "link_bps": 9e9}
        grid = np.arange(1_000.0, 70_000.0, 1_000.0)
        best = search(law, **case, thresholds_tokens=grid)
        points = [
            capacity(law, **case, threshold_tokens=t, n_prefill=n) for t in grid.tolist() for n in range(1, 8)
        ]
        top = max(p.lambda_max_rps for p in points)
        assert best.lambda_max_rps == top
        assert asdict(best) in [asdict(p) for p in points]
        tied = [p for p in points if p.lambda_max_rps >= top * (1 - 1e-9) and p.n_prefill == best.n_prefill]
        room = [
            min(p.theta_prfaas_rps / p.offload_share, p.theta_pdp_rps / (1 - p.offload_share)) for p in tied
        ]
        widest = [p for p, r in zip(tied, room, strict=True) if r >= max(room) * (1 - 1e-9)]
        assert best == widest[0]

    def test_a_tie_goes_to_the_widest_prefill(self) -> None:
        """Decode-bound over a range of thresholds: the one where equation 7 holds best, every time."""
        best = paper_search(output_tokens_mean=4096.0)
        assert best.lambda_max_rps == best.theta_pdd_rps
        others = [paper_point(t, 1, output_tokens_mean=4096.0) for t in (5_000, 8_000, 12_000, 14_000)]
        assert [o.lambda_max_rps for o in others] == [best.lambda_max_rps] * 4

        def room(o: Optimum) -> float:
            return min(o.theta_prfaas_rps / o.offload_share, o.theta_pdp_rps / (1 - o.offload_share))

        assert room(best) > max(room(o) for o in others)
        assert best == paper_search(output_tokens_mean=4096.0)

    def test_a_full_tie_goes_to_the_lowest_threshold(self) -> None:
        law = empirical_law([2_000, 50_000])
        best = search(law, **paper_case())
        assert best.threshold_tokens == 2_000
        assert best == search(law, **paper_case(), thresholds_tokens=np.array([2_000.0, 2_500.0, 49_999.0]))

    def test_without_remote_instances_never_is_the_only_threshold(self) -> None:
        best = paper_search(n_prfaas=0, remote=None, link_bps=0.0)
        assert best.threshold_tokens == math.inf
        assert best.lambda_max_rps == min(best.theta_pdp_rps, best.theta_pdd_rps)
        assert best == paper_search(n_prfaas=0)

    def test_a_dead_link_keeps_everything_local(self) -> None:
        best = paper_search(link_bps=0.0)
        assert best.threshold_tokens == 131_072
        assert best.offload_share == 0
        assert best.lambda_max_rps == paper_search(n_prfaas=0).lambda_max_rps

    def test_no_local_prefill_carries_only_what_goes_remote(self) -> None:
        assert paper_point(0, 0).lambda_max_rps == pytest.approx(2.45, rel=0.005)
        assert paper_point(19_400, 0).lambda_max_rps == 0

    def test_mistakes_are_told(self) -> None:
        for changes in (
            {"n_local": 1},
            {"splits": ()},
            {"splits": (8,)},
            {"splits": (-1,)},
            {"n_prfaas": -1},
            {"remote": None},
            {"link_bps": -1.0},
            {"link_bps": math.nan},
            {"output_tokens_mean": 0.0},
        ):
            with pytest.raises(PrfaasError, match="allowed: "):
                paper_search(**changes)
        with pytest.raises(PrfaasError, match="no PrfaaS instance"):
            paper_point(19_400, 3, n_prfaas=0)

    @settings(max_examples=40, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=30),
        n_prfaas=st.integers(0, 6),
        n_local=st.integers(2, 10),
        gbps=st.floats(0.5, 50),
        means=st.sampled_from(["representative", "service"]),
    )
    def test_laws(self, lengths: list[int], n_prfaas: int, n_local: int, gbps: float, means: Any) -> None:
        law = empirical_law(lengths)
        changes = {"n_prfaas": n_prfaas, "n_local": n_local, "link_bps": gbps * 1e9, "means": means}
        case = {**paper_case(), **changes}
        best = search(law, **case)
        assert best.n_prefill + best.n_decode == n_local
        assert best.egress_bps <= gbps * 1e9 * (1 + 1e-9)
        assert best.lambda_max_rps <= best.theta_pdd_rps
        again = capacity(law, **case, threshold_tokens=best.threshold_tokens, n_prefill=best.n_prefill)
        assert again == best
        for more in ({"n_prfaas": n_prfaas + 1}, {"link_bps": gbps * 2e9}, {"n_local": n_local + 1}):
            wider = search(law, **{**case, **more})
            # The grid ends at 131,072 and without remote instances at "never": compare like with like.
            if n_prfaas > 0:
                assert wider.lambda_max_rps >= best.lambda_max_rps * (1 - 1e-9)


class TestDecode:
    def test_constant_step(self) -> None:
        decode = DecodeProfile(a_s=0.025, slots=20, source="test")
        assert theory.decode_instance_rps(decode, 27_000, 1024) == pytest.approx(0.78125)

    def test_step_that_grows_with_batch_and_context(self) -> None:
        decode = DecodeProfile(a_s=0.01, b_s_per_sequence=0.001, c_s_per_token=1e-6, slots=10, source="test")
        # 10 sequences of 1,000 + 100 / 2 tokens: 0.01 + 0.01 + 0.0105 s for 10 tokens.
        assert theory.decode_instance_rps(decode, 1_000, 100) == pytest.approx(10 / 0.0305 / 100)

    def test_kv_room_below_the_slots(self) -> None:
        decode = DecodeProfile(
            a_s=0.1, slots=10, kv_capacity_tokens=6_000, kv_reserve_tokens=200, source="test"
        )
        assert theory.decode_batch(decode, 1_000) == 5
        assert theory.decode_batch(decode, 100) == 10
        assert theory.decode_batch(decode, 100_000) == 1
        assert theory.decode_instance_rps(decode, 1_000, 50) == pytest.approx(1.0)


class TestServiceTtft:
    @settings(max_examples=80, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 150_000), min_size=1, max_size=40),
        threshold=st.sampled_from([0.0, 1_000.0, 19_400.0, 60_000.0, math.inf]),
        q=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    )
    def test_quantile_is_that_of_the_mixed_sample(
        self, lengths: list[int], threshold: float, q: float
    ) -> None:
        remote, local = paper_case()["remote"], paper_case()["local"]
        sample = sorted(remote.seconds(n) if n > threshold else local.seconds(n) for n in lengths)
        want = sample[math.ceil(q * len(sample) - 1e-9) - 1]
        got = theory.service_ttft_quantile_s(empirical_law(lengths), remote, local, threshold, q)
        assert got == pytest.approx(want, abs=1e-6)
        mean = theory.service_ttft_mean_s(empirical_law(lengths), remote, local, threshold)
        assert mean == pytest.approx(sum(sample) / len(sample))

    def test_quantile_against_draws_of_the_papers_law(self) -> None:
        remote, local = paper_case()["remote"], paper_case()["local"]
        tokens = paper_law().quantile((np.arange(100_000) + 0.5) / 100_000)
        t = np.array([5_000.0, 19_400.0, 60_000.0, math.inf])
        got = theory.service_ttft_quantile_s(paper_law(), remote, local, t, 0.9)
        assert got.shape == (4,)
        for threshold, value in zip(t, got, strict=True):
            times = np.where(tokens > threshold, remote.seconds_array(tokens), local.seconds_array(tokens))
            assert value == pytest.approx(np.quantile(times, 0.9, method="inverted_cdf"), rel=2e-4)

    def test_flat_profiles(self) -> None:
        flat = PrefillTable(tokens=(100, 200, 300), seconds_at=(1.0, 1.0, 1.0), source="test")
        steps = PrefillTable(tokens=(100, 200, 300, 400), seconds_at=(1.0, 2.0, 2.0, 3.0), source="test")
        law = empirical_law([50, 150, 250, 350])
        assert theory.service_ttft_quantile_s(law, flat, flat, 0.0, 0.9) == pytest.approx(1.0, abs=1e-6)
        want = sorted(steps.seconds(n) for n in (50, 150, 250, 350))
        for k, q in enumerate((0.25, 0.5, 0.75, 1.0)):
            got = theory.service_ttft_quantile_s(law, None, steps, math.inf, q)
            assert got == pytest.approx(want[k], abs=1e-6)

    def test_offloading_to_nowhere_never_ends(self) -> None:
        law, local = empirical_law([100, 200]), paper_case()["local"]
        assert theory.service_ttft_mean_s(law, None, local, 150) == math.inf
        assert theory.service_ttft_quantile_s(law, None, local, 150, 0.9) == math.inf
        assert theory.service_ttft_quantile_s(law, None, local, 150, 0.5) < 1


class TestPlan:
    def test_a_scenario_without_a_remote_cluster(self) -> None:
        found = plan(load_scenario("homogeneous"))
        assert found["prfaas"] == found["homogeneous"]
        assert found["naive"] == plan(load_scenario("paper"))["naive"]

    def test_the_naive_deployment_is_divided_at_best(self) -> None:
        found = plan(load_scenario("paper", deployment="naive"))
        assert found["prfaas"] == plan(load_scenario("paper"))["prfaas"]

    def test_the_naive_baseline_has_the_scenarios_link(self) -> None:
        thin = load_scenario("paper", overrides=["deployment.links.0.capacity_bps=5 Gbps"])
        naive = plan(thin)["naive"]
        assert naive.egress_bps == pytest.approx(5e9)
        assert naive.lambda_max_rps < 1

    def test_floors_bound_the_split(self) -> None:
        floors = ["deployment.pd.0.min_decode=6", "deployment.pd.0.n_decode=6"]
        scenario = load_scenario("paper", overrides=["deployment.pd.0.n_prefill=2", *floors])
        assert plan(scenario)["prfaas"].n_prefill == 2

    def test_regimes_and_traces(self) -> None:
        drift, trace = plan(load_scenario("drift")), plan(load_scenario("mooncake"))
        assert drift["prfaas"].theta_pdd_rps > plan(load_scenario("paper"))["prfaas"].theta_pdd_rps
        assert trace["prfaas"].lambda_max_rps > trace["homogeneous"].lambda_max_rps
        share = trace["prfaas"].offload_share * 6_151
        assert share == pytest.approx(round(share), abs=1e-6)

    def test_baselines_need_their_hardware(self) -> None:
        raw = load_scenario("paper").model_dump(mode="json")
        raw["model"]["hardware"]["mine"] = raw["model"]["hardware"].pop("h20")
        raw["deployment"]["pd"][0]["hardware"] = "mine"
        found = plan(Scenario.model_validate(raw))
        assert list(found) == ["prfaas"]
        assert found["prfaas"] == plan(load_scenario("paper"))["prfaas"]

    def test_more_clusters_are_refused(self) -> None:
        raw = load_scenario("paper").model_dump(mode="json")
        raw["deployment"]["prfaas"].append({"name": "far", "hardware": "h200", "n_instances": 1})
        with pytest.raises(PrfaasError, match="at most one prfaas cluster and one pd cluster, found 2 and 1"):
            plan(Scenario.model_validate(raw))

    def test_json_form(self) -> None:
        content = plan(load_scenario("paper"))["homogeneous"].as_json()
        assert content["threshold_tokens"] is None
        assert list(content) == list(Optimum.__dataclass_fields__)


class TestCheapest:
    def test_equals_enumeration(self) -> None:
        """Every count up to the bounds and every threshold, through the forward model."""
        scenario, prices = load_scenario("paper"), {"h200": 2.5, "h20": 1.0}
        found = cheapest(scenario, rate_rps=1.3, ttft_p90_s=4.5, prices=prices, link_price_per_gbps=0.02)
        thresholds = np.concatenate([[0.0], THRESHOLDS_TOKENS])
        p90_s = theory.service_ttft_quantile_s(
            paper_law(), paper_case()["remote"], paper_case()["local"], thresholds, 0.9
        )
        allowed = thresholds[p90_s <= 4.5]
        costs = []
        for n_prfaas in range(1, 4):
            for n_local in range(1, 8):
                for link_bps in theory.LINK_LADDER_BPS:
                    best = paper_search(
                        n_prfaas=n_prfaas,
                        n_local=n_local,
                        link_bps=link_bps,
                        splits=range(n_local),
                        thresholds_tokens=allowed,
                        means="service",
                    )
                    if best.lambda_max_rps >= 1.3:
                        costs.append(2.5 * n_prfaas + n_local + 0.02 * link_bps / 1e9)
        assert found.cost == pytest.approx(min(costs))
        assert found.optimum.lambda_max_rps >= 1.3
        assert found.optimum.service_ttft_p90_s <= 4.5
        assert found.egress_bps <= found.link_bps in theory.LINK_LADDER_BPS

    def test_the_papers_counts_carry_their_own_rate(self) -> None:
        """At its own capacity the 4 / 3 / 5 deployment is enough, so the answer costs no more."""
        rate = paper_search(means="service").lambda_max_rps
        found = cheapest(load_scenario("paper"), rate_rps=rate, ttft_p90_s=3.6, prices={"h200": 2, "h20": 1})
        assert found.cost <= 4 * 2 + 8
        assert found.optimum.lambda_max_rps >= rate * (1 - 1e-9)

    def test_prices_decide(self) -> None:
        scenario = load_scenario("paper")
        dear = cheapest(scenario, rate_rps=3.0, ttft_p90_s=10.0, prices={"h200": 100.0})
        assert dear.optimum.n_prfaas == 0
        assert dear.optimum.threshold_tokens == math.inf
        assert (dear.link_bps, dear.egress_bps) == (0, 0)
        assert dear.cost == dear.optimum.n_prefill + dear.optimum.n_decode
        free = cheapest(scenario, rate_rps=3.0, ttft_p90_s=10.0, prices={"h200": 0.0})
        assert free.optimum.n_prefill == 0
        wire = cheapest(
            scenario, rate_rps=3.0, ttft_p90_s=10.0, prices={"h200": 0.0}, link_price_per_gbps=1e3
        )
        assert wire.link_bps == 0

    def test_a_tighter_ttft_needs_the_remote_cluster(self) -> None:
        scenario = load_scenario("paper")
        costs = [
            cheapest(scenario, rate_rps=3.0, ttft_p90_s=s, prices={"h200": 3.0}).cost
            for s in (10.0, 8.0, 6.0, 3.6)
        ]
        assert costs == sorted(costs)
        assert cheapest(scenario, rate_rps=3.0, ttft_p90_s=3.6).optimum.n_prfaas > 0

    def test_whole_instances_are_not_bought_for_rounding(self) -> None:
        """7 local instances of 0.07 s carry exactly 100 req/s, although 100 * 0.07 is above 7 in floats."""
        raw = load_scenario("homogeneous").model_dump(mode="json")
        flat = {"kind": "polynomial", "c0_s": 0.07, "c1_s_per_token": 0.0, "source": "test"}
        raw["model"]["hardware"]["h20"]["prefill"] = flat
        scenario = Scenario.model_validate(raw)
        assert 100 * 0.07 > 7
        found = cheapest(scenario, rate_rps=100.0, ttft_p90_s=0.07, means="representative")
        assert (found.optimum.n_prefill, found.optimum.n_decode) == (7, 128)
        assert cheapest(scenario, rate_rps=100.1, ttft_p90_s=0.07).optimum.n_prefill == 8

    def test_means(self) -> None:
        scenario = load_scenario("paper")
        light = cheapest(scenario, rate_rps=40.0, ttft_p90_s=4.0, means="representative")
        assert light.cost < cheapest(scenario, rate_rps=40.0, ttft_p90_s=4.0).cost

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rate_rps": 0.0}, "rate to plan for is 0 req/s; allowed: above 0"),
            ({"rate_rps": -1.0}, "rate to plan for is -1"),
            ({"rate_rps": math.nan}, "allowed: above 0"),
            ({"ttft_p90_s": 0.0}, "service TTFT P90 to plan for is 0 s"),
            ({"prices": {"h100": 1.0}}, "unknown hardware 'h100'; the model has h20, h200"),
            ({"prices": {"h200": -1.0}}, "price of h200 is -1"),
            ({"link_price_per_gbps": math.inf}, "link price is inf"),
            ({"ttft_p90_s": 1.0}, "the lowest on this hardware is 3.5"),
            ({"rate_rps": 1e6}, "no deployment carries 1e\\+06 req/s"),
        ],
    )
    def test_mistakes_are_told(self, changes: dict[str, Any], message: str) -> None:
        demand: dict[str, Any] = {"rate_rps": 3.0, "ttft_p90_s": 4.0, **changes}
        with pytest.raises(PrfaasError, match=message):
            cheapest(load_scenario("paper"), **demand)


class TestWhatSearchesShare:
    """A memory and the left-out service TTFT change the time of a search, never its result."""

    @settings(max_examples=40, deadline=None)
    @given(
        lengths=st.lists(st.lists(st.integers(1, 150_000), min_size=1, max_size=40), min_size=1, max_size=3),
        means=st.sampled_from(["representative", "service"]),
        splits=st.lists(st.sampled_from([(1,), (3, 4), (1, 2, 3, 4, 5, 6, 7)]), min_size=1, max_size=4),
        links=st.lists(st.sampled_from([0.0, 5e9, 100e9]), min_size=1, max_size=3),
    )
    def test_the_same_point(self, lengths: Any, means: Any, splits: Any, links: Any) -> None:
        memory = theory.DemandMemory()
        case = paper_case()
        more = [theory.RemotePath(case["local"], 1.5, 3e9)]
        laws = [empirical_law(some) for some in lengths]
        for law in (*laws, *laws):
            for split in splits:
                for link_bps in links:
                    given: dict[str, Any] = {**case, "splits": split, "link_bps": link_bps, "means": means}
                    for paths in ((), more):
                        alone = asdict(search(law, **given, more=paths))
                        shared = asdict(search(law, **given, more=paths, memory=memory, service_ttft=False))
                        for name in ("service_ttft_mean_s", "service_ttft_p90_s"):
                            assert alone.pop(name) > 0
                            assert math.isnan(shared.pop(name))
                        assert shared == alone

    def test_other_profiles_and_thresholds_are_not_mixed_up(self) -> None:
        memory = theory.DemandMemory()
        case = paper_case()
        quick = faster(case["remote"], 2.0)
        for remote in (case["remote"], quick, case["remote"]):
            for thresholds in (np.array([5_000.0]), np.array([20_000.0]), THRESHOLDS_TOKENS):
                changes = {"remote": remote, "thresholds_tokens": thresholds}
                assert paper_search(**changes, memory=memory) == paper_search(**changes)

    def test_what_was_left_out_is_null_in_json(self) -> None:
        found = paper_search(service_ttft=False).as_json()
        assert found["service_ttft_mean_s"] is None
        assert found["lambda_max_rps"] == pytest.approx(3.25, abs=0.01)
