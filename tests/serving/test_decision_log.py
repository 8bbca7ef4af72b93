"""The decision log: what is written is what is read, whole lines only, whatever the disk does."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env import __version__
from prfaas_env.base import PrfaasError
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import RECENT_LENGTHS
from prfaas_serving import decision_log
from prfaas_serving.decision_log import (
    ConversionLine,
    DecisionLine,
    DecisionLog,
    EventLine,
    HeaderLine,
    RequestLine,
    decision_from_json,
    decision_json,
    lengths_since,
    line_bytes,
    part_path,
    read_log,
)

SCENARIO = load_scenario("paper")
SCHEMA = scenario_schema(SCENARIO)
STAY = Decision.same(1, threshold_tokens=19_400.0)


def header(**changes: Any) -> HeaderLine:
    fields: dict[str, Any] = {
        "prfaas_version": __version__,
        "unix_s": 1_700_000_000.25,
        "schema_hash": SCHEMA.hash,
        "names": SCHEMA.names,
        "scenario": SCENARIO.model_dump(mode="json"),
        "scenario_hash": SCENARIO.hash,
        "policy_spec": "static",
        "policy_hash": "0123456789ab",
        "backend": "fake",
        "mode": "active",
    }
    return HeaderLine(**{**fields, **changes})


def decision(n: int, **changes: Any) -> DecisionLine:
    fields: dict[str, Any] = {
        "n": n,
        "time_ns": n * 10**9,
        "unix_s": 1_700_000_000.25 + n,
        "mode": "active",
        "values": tuple(float(n) / 3 + k for k in range(len(SCHEMA))),
        "conversion_tick": n % 15 == 0,
        "legal_moves": ((False, True, False),),
        "new_lengths": ((n, n + 1),),
        "proposed": STAY,
        "acted": STAY,
        "by": "policy",
        "reason": "",
        "policy_hash": "0123456789ab",
        "guard": "ok",
        "decide_us": 12.5,
    }
    return DecisionLine(**{**fields, **changes})


def request(arrival_ns: int, **changes: Any) -> RequestLine:
    fields: dict[str, Any] = {
        "arrival_ns": arrival_ns,
        "input_tokens": 1000,
        "incremental_tokens": {"pd0": 900, "prfaas0": 1000},
        "output_tokens": 7,
        "outcome": "finished",
        "remote": True,
        "ttft_s": 1.5,
        "tpot_s": 0.025,
    }
    return RequestLine(**{**fields, **changes})


OTHERS = (
    request(5),
    request(6, outcome="rejected", ttft_s=None, tpot_s=None, output_tokens=0, end_ns=9, pd=0),
    ConversionLine(
        ordered_ns=1,
        done_ns=None,
        cluster="pd0",
        worker="w1",
        from_role="decode",
        to_role="prefill",
        outcome="timed out",
    ),
    EventLine(time_ns=3, what="mode", text='to "shadow", by hand\nü'),
    EventLine(time_ns=4, what="reload", text="", policy_spec="never", policy_hash="f" * 12),
)


def write(path: Path, lines: Any, **options: Any) -> DecisionLog:
    log = DecisionLog(path, header(), **options)
    for line in lines:
        log.write(line)
    log.close()
    return log


# ----------------------------------------------------------------------------------------- lines


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lines = (decision(1), *OTHERS, decision(2, proposed=None, acted=None, by="hold", reason="stale"))
    log = write(tmp_path / "log.jsonl", lines)
    assert log.dropped == 0
    assert log.fault is None
    found = read_log(tmp_path / "log.jsonl")
    assert found.header == header()
    assert found.lines == lines
    assert (found.cut, found.parts, found.missing_decisions) == (0, 1, 0)
    assert [found.where(k).rpartition(":")[2] for k in range(3)] == ["2", "3", "4"]
    assert found.decisions == [lines[0], lines[-1]]
    assert found.requests == list(OTHERS[:2])
    assert found.conversions == [OTHERS[2]]
    assert found.events == list(OTHERS[3:])
    assert found.scenario == SCENARIO
    assert found.schema == SCHEMA


@pytest.mark.parametrize("line", [header(), decision(3), *OTHERS])
def test_each_line_is_one_json_object_with_its_kind_first(line: Any) -> None:
    text = line_bytes(line)
    assert text.count(b"\n") == 1
    assert next(iter(json.loads(text).items())) == ("kind", line.kind)
    assert type(line).from_json(text) == line
    assert type(line).from_json(line.as_json()) == line
    assert json.loads(text) == line.as_json()


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (
            Decision.same(1, threshold_tokens=19_400.0),
            {"threshold_tokens": 19_400, "margin_s": None, "cache_rule": "scarce", "moves": [1]},
        ),
        (
            Decision.same(1, threshold_tokens=math.inf, move=Move.DECODE_TO_PREFILL),
            {"threshold_tokens": "inf", "margin_s": None, "cache_rule": "scarce", "moves": [2]},
        ),
        (
            Decision.same(1, margin_s=-math.inf, cache_rule="abundant", move=Move.PREFILL_TO_DECODE),
            {"threshold_tokens": None, "margin_s": "-inf", "cache_rule": "abundant", "moves": [0]},
        ),
        (
            Decision((ClusterDecision(margin_s=0.1), ClusterDecision(threshold_tokens=1234.5))),
            {
                "threshold_tokens": [None, 1234.5],
                "margin_s": [0.1, None],
                "cache_rule": ["scarce", "scarce"],
                "moves": [1, 1],
            },
        ),
    ],
)
def test_a_decision_in_json(made: Decision, wanted: dict[str, Any]) -> None:
    assert decision_json(made) == wanted
    assert decision_from_json(json.loads(json.dumps(wanted))) == made


values = st.floats(allow_nan=False) | st.integers(0, 200_000).map(float)
clusters = st.builds(
    lambda value, margin, move, rule: ClusterDecision(
        threshold_tokens=None if margin else abs(value),
        margin_s=value if margin else None,
        move=Move(move),
        cache_rule=rule,
    ),
    values,
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from(["scarce", "abundant"]),
)


@given(st.lists(clusters, min_size=1, max_size=4))
def test_any_decision_survives(parts: list[ClusterDecision]) -> None:
    made = Decision(tuple(parts))
    assert decision_from_json(json.loads(json.dumps(decision_json(made)))) == made


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_telemetry_values_survive_to_the_last_bit(numbers: list[float]) -> None:
    line = decision(0, values=tuple(numbers))
    back = DecisionLine.from_json(line_bytes(line)).values
    assert [math.copysign(1, x) for x in back] == [math.copysign(1, x) for x in numbers]
    assert back == tuple(numbers)


# -------------------------------------------------------------------------------------- lengths


@given(st.lists(st.lists(st.integers(0, 3), max_size=700), min_size=1, max_size=6))
def test_lengths_since_rebuild_every_reading(batches: list[list[int]]) -> None:
    ring: list[int] = []
    before = (np.zeros(0, dtype=np.int64),)
    rebuilt: Any = ((),)
    for batch in batches:
        ring = (ring + batch)[-RECENT_LENGTHS:]
        now = (np.array(ring, dtype=np.int64),)
        new = lengths_since(before, now)
        assert len(new[0]) <= len(batch)
        rebuilt = decision_log._joined(rebuilt, new)
        assert rebuilt == (tuple(ring),)
        before = now


def test_telemetry_is_rebuilt_with_its_lengths(tmp_path: Path) -> None:
    lines = [decision(n, new_lengths=(tuple(range(n * 200, n * 200 + 200)),)) for n in range(3)]
    write(tmp_path / "log", [lines[0], request(1), *lines[1:]])
    read = list(read_log(tmp_path / "log").telemetry())
    assert [k for k, _, _ in read] == [0, 2, 3]
    for n, (_, line, telemetry) in enumerate(read):
        assert line == lines[n]
        assert telemetry.time_ns == line.time_ns
        assert telemetry.values.tolist() == list(line.values)
        assert telemetry.legal_moves == line.legal_moves
        last = (n + 1) * 200
        assert telemetry.recent_lengths_tokens[0].tolist() == list(range(max(0, last - 300), last))


# -------------------------------------------------------------------------------------- writing


def test_files_are_exchanged_whole_and_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines: list[Any] = []
    for n in range(100):
        lines += [decision(n), request(n * 10**9)]
    lines.insert(60, EventLine(time_ns=5, what="reload", text="", policy_spec="never", policy_hash="f" * 12))
    log = write(path, lines, max_bytes=decision_log.MIN_BYTES, keep=9)
    files = [path, *(part_path(path, k) for k in range(1, 10))]
    present = [file for file in files if file.exists()]
    assert len(present) >= 4
    assert all(file.stat().st_size <= decision_log.MIN_BYTES for file in present)
    assert log.dropped == 0
    whole = read_log(path)
    assert whole.parts == len(present)
    assert whole.lines == tuple(lines)
    assert whole.header == header()
    # a part alone knows the policy in force and the lengths before it
    last = read_log(path, parts=False)
    assert last.header.part == len(present) - 1
    assert (last.header.policy_spec, last.header.policy_hash) == ("never", "f" * 12)
    alone = list(last.telemetry())
    together = list(whole.telemetry())[-len(alone) :]
    for (_, a, left), (_, b, right) in zip(alone, together, strict=True):
        assert a == b
        assert left.recent_lengths_tokens[0].tolist() == right.recent_lengths_tokens[0].tolist()


def test_old_files_go_and_what_is_left_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [decision(n) for n in range(100)]
    write(path, lines, max_bytes=decision_log.MIN_BYTES, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1"]
    found = read_log(path)
    assert found.parts == 2
    assert found.header.part > 0
    assert found.lines == tuple(lines[-len(found.lines) :])
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "log", lines, max_bytes=decision_log.MIN_BYTES, keep=0)
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["log"]


def test_a_new_run_leaves_the_log_of_the_last_one_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "log", [decision(1)])
    log = DecisionLog(tmp_path / "log", header(unix_s=2.0))
    log.write(decision(7))
    log.close()
    assert [line.n for line in read_log(tmp_path / "log").decisions] == [7]
    assert [line.n for line in read_log(tmp_path / "log.1").decisions] == [1]


class FullDisk:
    """`os.write` of a disk that takes `room` more bytes, the last write in part."""

    def __init__(self) -> None:
        self.room = 10**9
        self.real = os.write

    def __call__(self, file: int, content: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self.real(file, bytes(content)[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("room", [0, 1, 700])
def test_a_full_disk_costs_whole_lines_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    disk = FullDisk()
    monkeypatch.setattr(decision_log.os, "write", disk)
    log = DecisionLog(tmp_path / "log", header())
    log.write(decision(1))
    assert log.flush()
    disk.room = room
    for line in (decision(2), request(1), decision(3)):
        log.write(line)
    assert log.flush()
    assert log.fault == "No space left on device"
    lost = log.dropped
    assert lost >= 2
    disk.room = 10**9
    log.write(decision(4))
    assert log.flush()
    assert log.fault is None
    log.close()
    assert log.dropped == lost
    found = read_log(tmp_path / "log")
    assert [line.n for line in found.decisions] == [1, 4]
    assert found.missing_decisions == 2
    assert [e.text for e in found.events] == [f"{lost} lines before this one were not written"]
    # the lengths of the lost lines are not lost
    assert found.decisions[1].new_lengths == ((2, 3, 3, 4, 4, 5),)


def test_a_disk_that_is_full_when_a_new_file_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    monkeypatch.setattr(decision_log.os, "write", disk)
    log = DecisionLog(tmp_path / "log", header(), max_bytes=decision_log.MIN_BYTES, keep=3)
    n, size = 1, len(line_bytes(header())) + len(line_bytes(decision(1)))
    log.write(decision(1))
    while size + len(line_bytes(decision(n + 1))) <= decision_log.MIN_BYTES:
        n += 1
        size += len(line_bytes(decision(n)))
        log.write(decision(n))
    assert log.flush()
    n += 1
    disk.room = 10  # not enough for another header
    log.write(decision(n))
    assert log.flush()
    assert (tmp_path / "log.1").exists()
    assert log.dropped == 1
    disk.room = 10**9
    log.write(decision(n + 1))
    log.close()
    found = read_log(tmp_path / "log")
    assert found.parts == 2
    assert [line.n for line in found.decisions] == [*range(1, n), n + 1]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate = threading.Event()
    real = os.write

    def hang(file: int, content: Any) -> int:
        gate.wait(10)
        return real(file, content)

    log = DecisionLog(tmp_path / "log", header())
    monkeypatch.setattr(decision_log.os, "write", hang)
    n = decision_log.QUEUE_LINES + 50
    for k in range(n):
        log.write(request(k))
    log.write(decision(1))
    assert log.dropped >= 49
    assert log.fault == "the disk does not keep up"
    gate.set()
    assert log.flush(30)
    log.write(decision(2))
    log.close(30)
    found = read_log(tmp_path / "log")
    assert len(found.lines) + log.dropped - 1 == n + 2  # less the line that tells of the loss
    assert found.decisions[-1].new_lengths == ((1, 2, 2, 3),)


def test_after_close_lines_are_counted(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [])
    log.write(decision(1))
    log.close()
    assert log.dropped == 1
    assert read_log(tmp_path / "log").lines == ()


def test_a_value_that_json_cannot_hold_is_dropped(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [decision(1, values=(math.nan,)), decision(2)])
    assert log.dropped == 1
    assert [line.n for line in read_log(tmp_path / "log").decisions] == [2]


@pytest.mark.parametrize(
    ("options", "told"), [({"max_bytes": 100}, "max_bytes must be at least"), ({"keep": -1}, "keep must be")]
)
def test_limits_that_make_no_sense(tmp_path: Path, options: dict[str, int], told: str) -> None:
    with pytest.raises(PrfaasError, match=told):
        DecisionLog(tmp_path / "log", header(), **options)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match="cannot be written: No such file"):
        DecisionLog(tmp_path / "absent" / "log", header())


# -------------------------------------------------------------------------------------- reading


def text_of(*lines: Any) -> bytes:
    return b"".join(line_bytes(line) for line in lines)


def test_a_last_line_cut_off_is_left_out_and_counted(tmp_path: Path) -> None:
    whole = text_of(header(), decision(1), decision(2))
    for end in (len(whole) - 2, len(text_of(header(), decision(1))) + 1):
        (tmp_path / "log").write_bytes(whole[:end])
        found = read_log(tmp_path / "log")
        assert ([line.n for line in found.decisions], found.cut) == ([1], 1)
    (tmp_path / "log").write_bytes(whole[:-1])  # only its end is missing
    assert ([line.n for line in read_log(tmp_path / "log").decisions], found.cut) == ([1, 2], 1)


def with_field(line: Any, **changes: Any) -> bytes:
    return json.dumps({**line.as_json(), **changes}).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", ": is empty"),
        (text_of(decision(1)), ":1: a decision log begins with a header, found decision"),
        (b"{}\n", ":1: "),
        (b"no json\n", ":1: "),
        (with_field(header(), format_version=2, new=1), ":1: format_version is 2; this version reads 1"),
        (text_of(header(), header()), ":2: a second header"),
        (text_of(header()) + b"[1]\n", ":2: "),
        (text_of(header()) + with_field(request(1), outcome="lost"), ":2: request.outcome: "),
        (text_of(header()) + with_field(request(1), extra=1), ":2: request.extra: "),
        (text_of(header()) + with_field(request(1), arrival_ns="1"), ":2: request.arrival_ns: "),
        (text_of(header(), request(1)) + with_field(decision(1), kind="other"), ":3: "),
        (text_of(header()) + with_field(decision(1), values=[1.0]), ":2: values has 1 entries; the header"),
        (text_of(header()) + with_field(decision(1), new_lengths=[]), ":2: new_lengths has 0 entries"),
        (
            text_of(header(), decision(2), decision(2)),
            ":3: decision 2 at 2000000000 ns comes after decision 2",
        ),
        (
            text_of(header())
            + with_field(decision(1), proposed={**decision_json(STAY), "threshold_tokens": "much"}),
            ":2: decision.proposed: threshold_tokens must be a number",
        ),
        (
            text_of(header()) + with_field(decision(1), acted={**decision_json(STAY), "moves": [3]}),
            ":2: decision.acted: moves must be a list of 0..2",
        ),
        (
            text_of(header()) + with_field(decision(1), acted={**decision_json(STAY), "margin_s": 1}),
            ":2: decision.acted: a decision needs exactly one of",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(PrfaasError) as error:
        read_log(path)
    assert str(error.value).startswith(f"{path}{told}")
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match="absent: cannot be read: No such file"):
        read_log(tmp_path / "absent")


def test_other_telemetry_is_named(tmp_path: Path) -> None:
    names = ("pd0.moon_phase", *SCHEMA.names[1:])
    (tmp_path / "log").write_bytes(text_of(header(names=names, schema_hash="0" * 12), decision(1)))
    with pytest.raises(
        PrfaasError,
        match=r"log:1: the log has other telemetry.*added: pd0.arrivals_valid; removed: pd0.moon_phase",
    ):
        _ = read_log(tmp_path / "log").schema
    (tmp_path / "log").write_bytes(text_of(header(schema_hash="0" * 12)))
    with pytest.raises(PrfaasError, match="other units or scales"):
        _ = read_log(tmp_path / "log").schema


def test_a_scenario_of_another_version_is_named(tmp_path: Path) -> None:
    raw = {**header().scenario, "weather": 1}
    (tmp_path / "log").write_bytes(text_of(header(scenario=raw)))
    with pytest.raises(PrfaasError, match=r"log:1: scenario: .*weather"):
        _ = read_log(tmp_path / "log").scenario


def test_lines_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision(1).n = 2  # type: ignore[misc]
