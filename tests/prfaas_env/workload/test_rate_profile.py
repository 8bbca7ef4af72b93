"""Arrivals that follow a file of rates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from prfaas_env.workload.arrivals import mean_arrival_rps, sample_arrivals_ns
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.means import mean_rate_rps, with_mean_rate
from prfaas_env.workload.models import ProfileArrivals, SyntheticWorkload
from prfaas_env.workload.rate_profile import gap_quantiles, rate_cycle, read_profile
from prfaas_env.workload.traces import bundled_profiles, resolve_trace_file

S = 1_000_000_000
HEADER = "window_start_s,total_rate_rps,active_clients,rate_weighted_mean_cv\n"
#: Four windows of 100 s: 2, 0, 6 and 4 per second; mean 3.
FOUR = HEADER + "0,2,1,1\n100,0,0,0\n200,6,1,3\n300,4,1,0.5\n"
SMALL = "bundled:servegen_m-small_rate_10min"


@pytest.fixture
def four(tmp_path):
    (tmp_path / "rates.csv").write_text(FOUR)
    return tmp_path


def _law(**settings):
    return ProfileArrivals(**({"file": "rates.csv"} | settings))


def _draw(base_dir, seed=0, horizon_s=None, n_requests=None, **settings):
    return sample_arrivals_ns(
        _law(**settings), seed, horizon_s=horizon_s, n_requests=n_requests, base_dir=base_dir
    )


# ------------------------------------------------------------------ the file


def test_columns_are_found_by_name(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("\ufeffTotal_Rate_RPS, window_start_s\r\n2.5,10\r\n\r\n5,30\r\n")
    profile = read_profile(path)
    assert profile.edges_s.tolist() == [10, 30, 50]
    assert profile.rates_rps.tolist() == [2.5, 5.0]
    assert profile.cv is None
    assert profile.mean_rps == 3.75
    path.write_text("window_start_s,total_rate_rps\n0,1\n10,1\n40,9\n")  # windows of 10, 30 and 30 s
    assert read_profile(path).mean_rps == pytest.approx((10 + 30 + 270) / 70)


def test_bundled_files():
    assert bundled_profiles() == ("servegen_m-large_rate_10min", "servegen_m-small_rate_10min")
    for name, mean, highest in (("large", 195.844, 582.9917), ("small", 1174.404, 3879.5083)):
        profile = read_profile(resolve_trace_file(f"bundled:servegen_m-{name}_rate_10min"))
        assert len(profile) == 2_016
        assert profile.edges_s[-1] == 14 * 86_400
        assert profile.mean_rps == pytest.approx(mean, abs=1e-3)
        assert profile.rates_rps.max() == highest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": the file is empty"),
        ("time,rate\n0,1\n", ":1: the header has no column 'window_start_s'; found ['time', 'rate']"),
        ("window_start_s,rate\n0,1\n", ":1: the header has no column 'total_rate_rps'"),
        (HEADER + "0,1,1,1\n100,2,1\n", ":3: 3 fields in '100,2,1'; the header has 4"),
        (HEADER + "0,1,1,1\n100,fast,1,1\n", ":3: total_rate_rps is 'fast'; a number from 0"),
        (HEADER + "0,1,1,1\n100,-2,1,1\n", ":3: total_rate_rps is '-2'"),
        (HEADER + "0,1,1,1\n100,nan,1,1\n", ":3: total_rate_rps is 'nan'"),
        (HEADER + "0,1,1,1\n100,inf,1,1\n", ":3: total_rate_rps is 'inf'"),
        (HEADER + "0,1,1,1\n100,1,1,\n", ":3: rate_weighted_mean_cv is ''"),
        (HEADER + "0,1,1,1\n\n0,2,1,1\n", ":4: window_start_s is 0 after 0; it must rise"),
        (HEADER + "0,1,1,1\n", ": 1 windows; at least 2"),
        ("version https://git-lfs.github.com/spec/v1\n", ":1: a Git LFS pointer"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, message):
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(PrfaasError) as error:
        read_profile(path)
    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


def test_a_changed_file_is_read_again(four):
    assert mean_arrival_rps(_law(), four) == 3.0
    (four / "rates.csv").write_text(FOUR + "400,8,1,1\n")
    assert mean_arrival_rps(_law(), four) == 4.0


# ------------------------------------------------------------------ the cycle


def test_cut_squeezed_and_scaled_by_hand(four):
    cycle = rate_cycle(_law(start_s=50, end_s=250, time_compression=10, rate_rps=4), four)
    # 50 s of 2, 100 s of 0, 50 s of 6: mean 2, scaled to 4; the time by ten, the rates by no more than that.
    assert cycle.start_s.tolist() == [0, 5, 15]
    assert cycle.rates_rps.tolist() == [4, 0, 12]
    assert cycle.period_s == 20
    assert cycle.mean_rps == 4
    cycle = rate_cycle(_law(), four)
    assert (cycle.start_s.tolist(), cycle.rates_rps.tolist()) == ([0, 100, 200, 300], [2, 0, 6, 4])
    assert (cycle.period_s, cycle.mean_rps) == (400, 3)
    cycle = rate_cycle(_law(start_s=100, end_s=300), four)  # at the edges of windows
    assert (cycle.start_s.tolist(), cycle.rates_rps.tolist()) == ([0, 100], [0, 6])
    assert rate_cycle(_law(max_cv=2), four).cv.tolist() == [1, 0, 2, 0.5]


def test_slices_outside_the_file_are_refused(four):
    for settings_ in ({"start_s": 400}, {"end_s": 401}, {"start_s": 900}):
        with pytest.raises(PrfaasError, match=r"is not within rates\.csv, which spans 400 s"):
            rate_cycle(_law(**settings_), four)
    with pytest.raises(PrfaasError, match="the slice has no arrivals, so no rate scales it"):
        rate_cycle(_law(start_s=100, end_s=200, rate_rps=1), four)
    (four / "plain.csv").write_text("window_start_s,total_rate_rps\n0,1\n10,3\n")
    with pytest.raises(
        PrfaasError, match="no column 'rate_weighted_mean_cv', which burstiness: column reads"
    ):
        rate_cycle(_law(file="plain.csv", burstiness="column"), four)
    assert len(_draw(four, file="plain.csv", horizon_s=100.0)) > 100


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"start_s": 5, "end_s": 5}, "end_s 5.0 must exceed start_s 5.0"),
        ({"time_compression": 0}, "time_compression"),
        ({"rate_rps": -1}, "rate_rps"),
        ({"burstiness": "gamma"}, "burstiness"),
        ({"scale": 2}, "unknown field 'scale'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings_, message):
    with pytest.raises(ValidationError, match=message):
        _law(**settings_)


# ------------------------------------------------------------------ arrivals


@pytest.mark.parametrize("burstiness", ["poisson", "column"])
def test_arrivals_follow_the_windows_and_begin_again(four, burstiness):
    totals = np.zeros(8)
    for seed in range(60):
        ns = _draw(four, seed, horizon_s=800.0, burstiness=burstiness)
        totals += np.bincount(ns // (100 * S), minlength=8)
    # A burst may run over the end of a window by one gap, and begins one earlier.
    assert totals[[1, 5]].tolist() == [0, 0]
    expected = np.array([2, 0, 6, 4] * 2) * 100.0
    assert totals / 60 == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("burstiness", ["poisson", "column"])
@pytest.mark.parametrize("squeeze", [1.0, 7.3])
def test_mean_rate(four, burstiness, squeeze):
    law = {"burstiness": burstiness, "time_compression": squeeze, "rate_rps": 5.0}
    assert mean_arrival_rps(_law(**law), four) == 5.0
    total = sum(len(_draw(four, seed, horizon_s=8_000.0, **law)) for seed in range(8))
    assert total / 64_000 == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("burstiness", ["poisson", "column"])
def test_a_count_and_a_longer_horizon_give_the_same_first_requests(four, burstiness):
    short = _draw(four, 3, horizon_s=250.0, burstiness=burstiness)
    long = _draw(four, 3, horizon_s=3_000.0, burstiness=burstiness)
    counted = _draw(four, 3, n_requests=len(long), burstiness=burstiness)
    assert np.all(np.diff(long) >= 0)
    assert np.array_equal(long[: len(short)], short)
    assert long[len(short)] >= 250 * S
    assert np.array_equal(counted, long)
    assert not np.array_equal(_draw(four, 4, horizon_s=250.0, burstiness=burstiness), short)


@given(
    seed=st.integers(0, 2**32),
    horizon_s=st.floats(0.0, 900.0),
    squeeze=st.floats(0.2, 30.0),
    rate_rps=st.floats(0.0, 20.0),
    burstiness=st.sampled_from(["poisson", "column"]),
    n=st.integers(0, 200),
)
@settings(max_examples=60, deadline=None)
def test_laws(tmp_path_factory, seed, horizon_s, squeeze, rate_rps, burstiness, n):
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "rates.csv").exists():
        (folder / "rates.csv").write_text(FOUR)
    law = {"time_compression": squeeze, "rate_rps": rate_rps, "burstiness": burstiness}
    ns = _draw(folder, seed, horizon_s=horizon_s, **law)
    assert ns.dtype == np.int64
    assert np.all(np.diff(ns) >= 0)
    assert np.all((ns >= 0) & (ns < horizon_s * S))
    # None in the window without a rate, but for the rounding at its end.
    place_s = (ns / S * squeeze) % 400
    assert not np.any((place_s > 100.0001) & (place_s < 199.9999))
    if rate_rps > 1e-3:
        counted = _draw(folder, seed, n_requests=n, **law)
        assert len(counted) == n
        both = min(n, len(ns))
        assert np.array_equal(counted[:both], ns[:both])


def test_another_rate_moves_the_same_requests(four):
    slow = _draw(four, 9, n_requests=400, start_s=200, end_s=300, rate_rps=1.0)
    fast = _draw(four, 9, n_requests=400, start_s=200, end_s=300, rate_rps=4.0)
    assert np.allclose(slow / 4.0, fast, atol=2.0)


def test_burstiness_of_a_window(four):
    # Windows alone: CV 3 from 200 s, 0.5 from 300 s, and Poisson for both without the column.
    for start_s, burstiness, cv in ((200, "column", 3.0), (300, "column", 0.5), (300, "poisson", 1.0)):
        law = {"start_s": start_s, "end_s": start_s + 100, "burstiness": burstiness}
        gaps = np.concatenate([np.diff(_draw(four, s, n_requests=20_000, **law)) for s in range(3)])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_gaps_of_a_cv():
    u = (np.arange(50_000) + 0.5) / 50_000
    for cv in (0.5, 1.0, 2.5):
        gaps = gap_quantiles(cv)(u)
        assert gaps.mean() == pytest.approx(1.0, rel=1e-3)
        assert gaps.std() == pytest.approx(cv, rel=0.01)
    assert gap_quantiles(1.0)(u) == pytest.approx(-np.log1p(-u))
    assert set(gap_quantiles(0.0)(u).tolist()) == {1.0}


def test_no_rate_is_an_empty_table(four):
    assert len(_draw(four, horizon_s=500.0, rate_rps=0.0)) == 0
    assert len(_draw(four, horizon_s=90.0, start_s=100, end_s=200)) == 0
    assert len(_draw(four, horizon_s=0.0)) == 0
    with pytest.raises(PrfaasError, match="rate_rps is 0, so 3 requests never arrive"):
        _draw(four, n_requests=3, rate_rps=0.0)


def test_too_many_windows_are_a_mistake_in_units(four):
    with pytest.raises(PrfaasError, match=r"windows in 3600 s; allowed: 10,000,000; check time_compression"):
        _draw(four, horizon_s=3600.0, time_compression=1e6, rate_rps=0.1)


# ------------------------------------------------------------------ in a workload


def test_rates_are_set_exactly(four):
    lengths = {"kind": "fixed", "tokens": 10}
    workload = SyntheticWorkload(
        arrivals=_law(burstiness="column"), input_tokens=lengths, output_tokens=lengths
    )
    assert mean_rate_rps(workload, four) == 3.0
    faster = with_mean_rate(workload, 7.7, four)
    assert mean_rate_rps(faster, four) == 7.7
    assert rate_cycle(faster.arrivals, four).mean_rps == pytest.approx(7.7, rel=1e-12)
    table = generate_requests(faster, seed=0, horizon_s=4_000.0, base_dir=four)
    assert len(table) / 4_000 == pytest.approx(7.7, rel=0.05)


def test_diurnal_is_a_day_in_an_hour():
    workload = load_scenario("diurnal").workload
    arrivals = workload.arrivals
    cycle = rate_cycle(arrivals)
    assert len(cycle.rates_rps) == 144
    assert cycle.period_s == 3_600
    assert cycle.mean_rps == pytest.approx(1.8, rel=1e-12)
    assert mean_rate_rps(workload) == 1.8
    day = read_profile(resolve_trace_file(SMALL)).rates_rps[:144]
    assert cycle.rates_rps == pytest.approx(day * 1.8 / day.mean())
    counts = np.zeros(6)
    for seed in range(40):
        table = generate_requests(workload, seed=seed, horizon_s=3_600.0)
        counts += np.bincount(table.arrival_ns // (600 * S), minlength=6)
    expected = cycle.rates_rps.reshape(6, 24).mean(axis=1) * 600
    assert counts / 40 == pytest.approx(expected, rel=0.06)


def test_profile_as_a_request_trace_is_refused():
    for trace_format in ("azure", "mooncake", "burstgpt"):
        with pytest.raises(PrfaasError, match=":1: a profile of rates, not requests; use it as arrivals of"):
            generate_requests(_trace(trace_format), seed=0)


def _trace(trace_format):
    from prfaas_env.workload.models import TraceWorkload

    return TraceWorkload(file=SMALL, format=trace_format)
