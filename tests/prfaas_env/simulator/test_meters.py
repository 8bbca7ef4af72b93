"""Meters at the door and on the wire, fed by hand: windows of whole seconds, bins, observed capacity."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.telemetry import (
    LENGTH_BIN_EDGES_TOKENS,
    LONG_WINDOW_S,
    N_BUCKETS,
    N_DOOR_COLUMNS,
    N_RATE_COLUMNS,
    WINDOWS_S,
    DoorMeter,
    LinkMeter,
    length_bin,
    roll_windows,
)

S = 1_000_000_000
NOMINAL = 100e6

# ------------------------------------------------------------------------------------- observed capacity


class Wire(LinkMeter):
    """A meter that knows how far it has been fed."""

    __slots__ = ("at_ns",)

    def __init__(self, peak_from_s=0.0):
        super().__init__(NOMINAL, peak_from_s)
        self.at_ns = 0


def feed(wire, *spans):
    """Spans (seconds, bit/s, congested) one after the other; gives the meter."""
    for seconds, bps, congested in spans:
        wire.at_ns += round(seconds * S)
        wire.advance(wire.at_ns, bps, congested)
    return wire


def test_without_evidence_it_is_nominal():
    meter = feed(Wire(), (300, 30e6, False))
    assert meter.observed_bps == NOMINAL
    reading = meter.reading(300 * S)
    assert (reading["observed_valid"], reading["observed_age_s"]) == (0.0, 0.0)
    assert reading["observed_capacity_bps"] == reading["nominal_capacity_bps"] == NOMINAL


def test_a_window_with_backlog_throughout_is_evidence():
    meter = feed(Wire(), (4, 20e6, True))
    assert meter.observed_bps == NOMINAL
    feed(meter, (0.999999999, 20e6, True))
    assert meter.observed_bps == NOMINAL
    feed(meter, (1e-9, 20e6, True))
    assert meter.observed_bps == pytest.approx(20e6)
    assert meter.reading(5 * S)["observed_valid"] == 1.0
    assert meter.reading(5 * S)["observed_age_s"] == 0.0
    assert meter.reading(7_500_000_000)["observed_age_s"] == 2.5


def test_a_window_with_a_moment_without_backlog_is_not():
    meter = feed(Wire(), (2, 20e6, True), (1e-9, 20e6, False), (2.999999999, 20e6, True))
    assert meter.observed_bps == NOMINAL
    # the moment lies in second 2: it leaves the window of 5 s at 8 s
    feed(meter, (2, 20e6, True))
    assert meter.observed_bps == NOMINAL
    feed(meter, (1, 20e6, True))
    assert meter.observed_bps == pytest.approx(20e6)


def test_it_is_the_rate_over_the_window():
    meter = feed(Wire(), *((1, k * 10e6, True) for k in range(1, 6)))
    assert meter.observed_bps == pytest.approx(30e6)
    # the next window is 20..60
    feed(meter, (1, 60e6, True))
    assert meter.observed_bps == pytest.approx(40e6)
    # and evidence of less lowers it at once
    feed(meter, (5, 5e6, True))
    assert meter.observed_bps == pytest.approx(5e6)


def test_a_faster_window_raises_it_without_backlog():
    meter = feed(Wire(), (5, 20e6, True))
    for second, average in enumerate((22e6, 24e6, 26e6, 28e6, 30e6), start=6):
        feed(meter, (1, 30e6, False))
        assert meter.observed_bps == pytest.approx(average)
        # what raised it is evidence
        assert meter.reading(second * S)["observed_age_s"] == 0.0
    feed(meter, (20, 29e6, False))
    assert meter.observed_bps == pytest.approx(30e6)
    assert meter.reading(30 * S)["observed_age_s"] == 20.0


def test_it_is_never_above_nominal():
    meter = feed(Wire(), (10, 500e6, True))
    assert meter.observed_bps == NOMINAL


def test_a_dead_link_leaves_a_hundredth():
    meter = feed(Wire(), (5, 0.0, True))
    assert meter.observed_bps == 1e6


def test_recovery_after_a_minute_of_silence():
    meter = feed(Wire(), (5, 20e6, True), (59, 0.0, False))
    assert meter.observed_bps == pytest.approx(20e6)
    # last evidence at 5 s: a tenth more at 65, 70, 75 ...
    feed(meter, (0.999999999, 0.0, False))
    assert meter.observed_bps == pytest.approx(20e6)
    feed(meter, (1e-9, 0.0, False))
    assert meter.observed_bps == pytest.approx(22e6)
    feed(meter, (4, 0.0, False))
    assert meter.observed_bps == pytest.approx(22e6)
    feed(meter, (1, 0.0, False))
    assert meter.observed_bps == pytest.approx(24.2e6)
    # 1.1^16 < 5 < 1.1^17: nominal at 65 + 16 x 5 = 145 s, and there it stays
    feed(meter, (74, 0.0, False))
    assert meter.observed_bps == pytest.approx(20e6 * 1.1**16)
    feed(meter, (1, 0.0, False))
    assert meter.observed_bps == NOMINAL
    feed(meter, (600, 0.0, False))
    assert meter.observed_bps == NOMINAL
    assert meter.reading(745 * S)["observed_age_s"] == 740.0


def test_new_evidence_stops_the_recovery():
    meter = feed(Wire(), (5, 20e6, True), (60, 0.0, False), (5, 10e6, True))
    # at 65 s 22e6; at 70 s a full window of backlog at 10e6
    assert meter.observed_bps == pytest.approx(10e6)
    feed(meter, (59, 0.0, False))
    assert meter.observed_bps == pytest.approx(10e6)
    feed(meter, (1, 0.0, False))
    assert meter.observed_bps == pytest.approx(11e6)


def test_little_traffic_is_no_evidence_and_does_not_stop_the_recovery():
    meter = feed(Wire(), (5, 20e6, True), (60, 1e6, False))
    assert meter.observed_bps == pytest.approx(22e6)


def test_reading_between_events_leaves_later_figures_as_they_are():
    silent, read = Wire(), Wire()
    events = [(0.3, 10e6, True), (3.7, 70e6, False), (9.9, 30e6, True), (80.2, 0.0, False), (95.0, 1e6, True)]
    for k, (at_s, bps, congested) in enumerate(events):
        start = 0 if k == 0 else round(events[k - 1][0] * S)
        for odd in range(start + 1, round(at_s * S), 123_456_789):
            read.advance_for_reading(odd, bps, congested)
            read.reading(odd)
        for meter in (silent, read):
            meter.advance(round(at_s * S), bps, congested)
    assert silent.observed_bps == read.observed_bps
    assert silent.peak_bps == read.peak_bps
    assert np.array_equal(silent.table, read.table)
    assert np.array_equal(silent.state, read.state)


def test_utilisation_over_whole_seconds():
    meter = feed(Wire(), (1, 50e6, False), (1.5, 100e6, False))
    # before five seconds have passed, over those that have
    assert meter.reading(2 * S)["utilisation_5s"] == pytest.approx(0.75)
    assert meter.reading(2_999_999_999)["utilisation_5s"] == pytest.approx(0.75)
    feed(meter, (7.5, 0.0, False))
    # 50e6 + 2 x 100e6 (half of the third second counts half)
    for at_s, five, thirty in [
        (3, 2.0 / 3, 2.0 / 3),
        (5, 0.4, 0.4),
        (6, 0.3, 2.0 / 6),
        (7, 0.1, 2.0 / 7),
        (8, 0, 0.25),
    ]:
        assert meter.reading(at_s * S)["utilisation_5s"] == pytest.approx(five)
        assert meter.reading(at_s * S)["utilisation_30s"] == pytest.approx(thirty)


def test_peak_is_that_of_a_whole_second_from_the_warm_up_on():
    meter = feed(Wire(peak_from_s=2.0), (1, 90e6, False), (1, 10e6, False), (0.5, 60e6, False))
    assert meter.peak_bps == 0.0
    feed(meter, (0.5, 0.0, False))
    assert meter.peak_bps == pytest.approx(30e6)
    feed(meter, (1.25, 40e6, False), (0.75, 0.0, False))
    assert meter.peak_bps == pytest.approx(40e6)


# ------------------------------------------------------------------------------------------ at the door


def test_a_window_covers_the_whole_seconds_before_the_reading():
    door = DoorMeter(None, None)
    door.arrival(S // 2, 1000, 1000)
    door.arrival(S, 3000, 3000)  # second 1
    assert door.reading(999_999_999)["arrivals_valid"] == 0.0
    assert door.reading(999_999_999)["arrival_rate_5s_rps"] == 0.0
    for at_ns in (S, 2 * S - 1):
        reading = door.reading(at_ns)
        assert reading["arrivals_valid"] == 1.0
        assert reading["arrival_rate_5s_rps"] == reading["arrival_rate_120s_rps"] == 1.0
        assert reading["input_token_rate_5s_tps"] == 1000.0
    reading = door.reading(2 * S)
    assert reading["arrival_rate_5s_rps"] == 1.0
    assert reading["input_token_rate_30s_tps"] == 2000.0
    assert door.reading(5 * S)["arrival_rate_5s_rps"] == 0.4
    # second 0 is in the window of 5 s at 5 s and no longer at 6 s
    assert door.reading(6 * S)["arrival_rate_5s_rps"] == 0.2
    assert door.reading(6 * S)["arrival_rate_30s_rps"] == pytest.approx(2 / 6)
    assert door.reading(7 * S)["arrival_rate_5s_rps"] == 0.0
    assert door.reading(30 * S)["arrival_rate_30s_rps"] == pytest.approx(2 / 30)
    assert door.reading(31 * S)["arrival_rate_30s_rps"] == pytest.approx(1 / 30)
    assert door.reading(120 * S)["arrival_rate_120s_rps"] == pytest.approx(2 / 120)
    assert door.reading(121 * S)["arrival_rate_120s_rps"] == pytest.approx(1 / 120)
    assert door.reading(122 * S)["lengths_valid"] == 0.0


def test_the_ring_forgets_what_it_overwrites():
    door = DoorMeter(None, None)
    door.arrival(S // 2, 1000, 1000)
    # 121 buckets: second 121 takes the place of second 0
    door.arrival(121 * S, 5000, 5000)
    assert door.reading(122 * S)["arrival_rate_120s_rps"] == pytest.approx(1 / 120)
    assert door.reading(122 * S)["input_token_rate_120s_tps"] == pytest.approx(5000 / 120)
    # what is being filled does not count
    assert door.reading(121 * S)["lengths_valid"] == 0.0


def test_length_shares():
    door = DoorMeter(None, None)
    for tokens in (100, 128, 1000, 131_072, 500_000):
        door.arrival(0, tokens, tokens)
    reading = door.reading(S)
    shares = [reading[f"length_share_{k:02d}"] for k in range(24)]
    assert shares[0] == 0.4
    assert shares[23] == 0.4
    # 1,000 = 128 x 1024^(x / 24): x = 7.117
    assert shares[7] == 0.2
    assert sum(shares) == pytest.approx(1.0)


@given(st.floats(1, 1e7))
def test_length_bins_are_log_spaced(tokens):
    exact = 24 * math.log(tokens / 128) / math.log(1024)
    if abs(exact - round(exact)) > 1e-9:
        assert length_bin(tokens) == min(max(math.floor(exact), 0), 23)


def test_a_length_at_an_edge_belongs_to_the_bin_above():
    for k, edge in enumerate(LENGTH_BIN_EDGES_TOKENS[:24]):
        assert length_bin(float(edge)) == k
        assert length_bin(float(np.nextafter(edge, 0))) == max(k - 1, 0)
    assert [length_bin(t) for t in (0, 1, 127, 128, 131_071, 131_072, 10**9)] == [0, 0, 0, 0, 23, 23, 23]


def test_outputs_attainment_hits_and_rejections():
    door = DoorMeter(2.0, 0.025)
    for ttft_s in (1.0, 2.0, 2.0 + 1e-9, 2.1):
        door.first_token(S // 2, ttft_s)
    for tokens, tpot_s in ((100, 0.025), (300, 0.0251)):
        door.finished(S // 2, tokens, tpot_s)
    door.rejected(S // 2)
    door.arrival(S // 2, 600, 1000)
    reading = door.reading(S)
    # an objective counts as met up to a relative 1e-9
    assert (reading["ttft_valid"], reading["ttft_attainment"]) == (1.0, 0.75)
    assert (reading["tpot_valid"], reading["tpot_attainment"]) == (1.0, 0.5)
    assert (reading["output_valid"], reading["output_tokens_mean"]) == (1.0, 200.0)
    assert reading["hit_share"] == pytest.approx(0.4)
    assert reading["rejected_120s"] == 1.0
    assert door.reading(121 * S)["rejected_120s"] == 0.0
    assert door.reading(121 * S)["output_valid"] == 0.0
    without = DoorMeter(None, None)
    without.first_token(0, 1.0)
    without.finished(0, 10, 1.0)
    assert without.reading(S)["ttft_valid"] == without.reading(S)["tpot_valid"] == 0.0


def test_recent_lengths_are_the_last_300_oldest_first():
    door = DoorMeter(None, None)
    for k in range(1, 412):
        door.arrival(k, k, k)
    assert door.recent_lengths().tolist() == list(range(112, 412))
    assert DoorMeter(None, None).recent_lengths().tolist() == []


@settings(max_examples=50, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 400 * S), st.integers(1, 200_000)), max_size=60),
    st.integers(0, 400 * S),
)
def test_rates_are_plain_counts_over_the_window(arrivals, at_ns):
    door = DoorMeter(None, None)
    before = sorted(a for a in arrivals if a[0] < at_ns)
    for t, tokens in before:
        door.arrival(t, tokens, tokens)
    reading = door.reading(at_ns)
    whole = at_ns // S
    for window_s in (5, 30, 120):
        inside = [tokens for t, tokens in before if max(whole - window_s, 0) * S <= t < whole * S]
        seconds = max(min(window_s, whole), 1)
        assert reading[f"arrival_rate_{window_s}s_rps"] == pytest.approx(len(inside) / seconds)
        assert reading[f"input_token_rate_{window_s}s_tps"] == pytest.approx(sum(inside) / seconds)


# ---------------------------------------------------------------------------------- running window sums


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 3) | st.integers(0, 400), st.integers(0, 20), st.booleans()), max_size=30
    )
)
def test_running_sums_are_those_of_the_ring(events):
    """Seconds that pass (sometimes more than the ring holds), tokens of an arrival, whether anyone reads."""
    meter = DoorMeter(None, None)
    sums = np.zeros(len(WINDOWS_S) * N_DOOR_COLUMNS)
    second = rolled = 0

    def roll():
        nonlocal rolled
        roll_windows(meter.stamps, 0, meter.table, 0, N_DOOR_COLUMNS, N_RATE_COLUMNS, sums, 0, rolled, second)
        rolled = second

    for seconds, tokens, read in events:
        second += seconds
        if tokens:
            roll()
            meter.arrival(second * S, 100 * tokens, 100 * tokens)
        if read:
            roll()
            rows = meter.table.reshape(N_BUCKETS, N_DOOR_COLUMNS)
            for w, window_s in enumerate(WINDOWS_S):
                n = N_DOOR_COLUMNS if window_s == LONG_WINDOW_S else N_RATE_COLUMNS
                inside = (meter.stamps >= second - window_s) & (meter.stamps < second) & (meter.stamps >= 0)
                found = sums[w * N_DOOR_COLUMNS :][:n]
                assert found.tolist() == rows[inside].sum(axis=0)[:n].tolist()
