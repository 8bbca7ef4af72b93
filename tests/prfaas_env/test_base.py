"""Rates with units, streams, one-line errors, whole files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from prfaas_env.base import (
    STREAMS,
    Bps,
    Frozen,
    PrfaasError,
    first_error,
    parse_bps,
    parse_bytes,
    stream,
    write_whole,
)


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("100 Gbps", 100e9),
        ("100 gbps", 100e9),
        ("0.5 Tbps", 5e11),
        ("100Mbps", 1e8),
        ("7 kbps", 7e3),
        ("1e9 bps", 1e9),
        ("3 bit/s", 3.0),
        ("2 Gbit/s", 2e9),
        ("2 Mbit/s", 2e6),
        ("12.5 GB/s", 100e9),  # bytes, 8 bits each
        ("1 MB/s", 8e6),
        ("1 kB/s", 8e3),
        ("1 B/s", 8.0),
        ("1 TB/s", 8e12),
        ("5e9", 5e9),  # a bare number is bit/s, as the field's name says
        (5e9, 5e9),
    ],
)
def test_a_rate_is_bits_per_second_in_powers_of_1000(text: object, bps: float) -> None:
    assert parse_bps(text) == bps


@pytest.mark.parametrize("unit", ["GBps", "GBPS", "MBps", "GB", "Gb/s", "gb/s", "GiB/s", "Gibps", "G", "s"])
def test_a_unit_that_could_mean_bits_or_bytes_is_refused(unit: str) -> None:
    with pytest.raises(
        ValueError, match=f"unknown unit '{unit}' in '100 {unit}'; allowed: Gbps, Mbps, bit/s"
    ):
        parse_bps(f"100 {unit}")


@pytest.mark.parametrize(
    "text", ["fast", "", "Gbps", "100e Gbps", "1-2 Gbps", "nan", "inf Gbps", "1 000 Gbps"]
)
def test_a_text_without_a_number_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        parse_bps(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("256 GB", 256e9),
        ("2 TiB", 2 * 2**40),
        ("1.5 MiB", 1.5 * 2**20),
        ("7kB", 7e3),
        ("12 B", 12),
        ("1e12", 1e12),
        (5, 5),
        (None, None),
    ],
)
def test_bytes_come_in_powers_of_1000_or_1024(text: object, n_bytes: float | None) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5 gb", "unknown unit 'gb' in '5 gb'; allowed: B, kB, MB"),
        ("5 Gb", "unknown unit 'Gb'"),
        ("5 GB/s", "not a number of bytes: '5 GB/s'; write a number of bytes or a text like '256 GB'"),
        ("GB", "not a number of bytes"),
        ("1-2 GB", "not a number of bytes"),
    ],
)
def test_other_texts_are_no_bytes(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


class _Part(Frozen):
    rate_bps: Bps = Field(default=1.0, gt=0)
    counts: tuple[int, ...] = ()


class _Whole(Frozen):
    part: _Part = _Part()
    size: int = 0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"size": "big"}, "f.yaml: size: Input should be a valid integer, .* \\(found 'big'\\)"),
        ({"part": {"counts": [1, "x"]}}, "f.yaml: part.counts.1: .*valid integer.*found 'x'"),
        ({"part": {"rate_bps": "5 GBps"}}, "f.yaml: part.rate_bps: unknown unit 'GBps'"),
        ({"part": {"rate_bps": "1e999 Gbps"}}, "f.yaml: part.rate_bps: Input should be a finite number"),
        ({"part": {"rate_bps": -1}}, r"f.yaml: part.rate_bps: Input should be greater than 0 \(found -1\)"),
        ({"part": {"rate": 5}}, "f.yaml: part: unknown field 'rate'; known: rate_bps, counts$"),
        ({"sise": 1}, r"f.yaml: \(top level\): unknown field 'sise'; known: part, size$"),
        ({3: 1}, r"f.yaml: \(top level\): unknown field 3; known: part, size$"),
        ({"size": "a", "part": 3}, r"f.yaml: part: .*\(found 3\) \(and 1 more\)"),
    ],
)
def test_first_error_is_one_line_with_file_field_and_what_was_found(raw: object, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Whole.model_validate(raw)
    told = first_error(caught.value, "f.yaml")
    assert isinstance(told, PrfaasError)
    assert "\n" not in str(told)
    with pytest.raises(PrfaasError, match=f"^{message}"):
        raise told


@given(st.integers(0, 2**63), st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 9), max_size=2))
def test_streams_are_reproducible_and_apart(seed: int, name: str, index: list[int]) -> None:
    draws = stream(seed, name, *index).random(3)
    assert np.array_equal(draws, stream(seed, name, *index).random(3))
    others = [stream(seed, other, *index) for other in STREAMS if other != name]
    others += [stream(seed + 1, name, *index), stream(seed, name, *index, 0)]
    assert not any(np.array_equal(draws, other.random(3)) for other in others)


def test_stream_numbers_never_change() -> None:
    """They are part of every stored result: append, never renumber."""
    names = [
        "arrivals",
        "input_lengths",
        "output_lengths",
        "prefixes",
        "link",
        "faults",
        "background",
        "policy",
    ]
    assert list(STREAMS.items())[:8] == list(zip(names, range(8), strict=True))
    assert len(set(STREAMS.values())) == len(STREAMS)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_whole(path, "first\n")
    write_whole(path, "zweites, größer\n")
    assert path.read_text(encoding="utf-8") == "zweites, größer\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".", "Is a directory"),
        ("gone/out.csv", "No such file or directory"),
        ("file/out.csv", "Not a directory"),
        ("n" * 254, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("untouched")
    with pytest.raises(PrfaasError, match=f"cannot be written: {reason}$") as caught:
        write_whole(tmp_path / name, "text")
    assert str(tmp_path / name) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "untouched"


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_stops_half_way_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    def half(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:2].encode(encoding))
        raise stop

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises((PrfaasError, KeyboardInterrupt)):
        write_whole(path, "new text")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "sub").mkdir()
    link = tmp_path / "sub" / "link.csv"
    link.symlink_to("../real.csv")
    write_whole(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real.csv").read_text() == "new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link.csv", "real.csv", "sub"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
