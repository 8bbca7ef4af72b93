"""`prfaas watch`: which ticks are shown and for how long, films whole or absent, mistakes in one line."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.cli import app
from prfaas_env.cli_watch import Film, frames, plan_film, write_film
from prfaas_env.scenarios import load_scenario

SHORT = load_scenario("paper", overrides=["measure.horizon_s=60"])
ARGUMENTS = ["watch", "--engine", "simpy", "--policy", "earliest_finish", "--set", "measure.horizon_s=60"]


@pytest.mark.parametrize(
    ("control_s", "speed", "from_s", "to_s", "ticks", "frame_s"),
    [
        (1.0, 20.0, 0.0, 10.0, [0, 2, 4, 6, 8, 10], 0.1),
        (1.0, 1.0, 3.0, 5.5, [3, 4, 5], 1.0),  # no picture between two decisions
        (1.0, 15.0, 0.5, 5.0, [1, 3, 5], 0.13),  # whole hundredths
        (5.0, 20.0, 0.0, 20.0, [0, 1, 2, 3, 4], 0.25),
        (0.5, 10.0, 0.0, 3.0, [0, 2, 4, 6], 0.1),
        (1.0, 600.0, 0.0, 180.0, [0, 60, 120, 180], 0.1),
    ],
)
def test_ticks_and_times_by_hand(
    control_s: float, speed: float, from_s: float, to_s: float, ticks: list[int], frame_s: float
) -> None:
    film = Film(control_s, speed, from_s, to_s)
    assert list(film.ticks) == ticks
    assert film.n_frames == len(ticks)
    assert film.frame_s == pytest.approx(frame_s)


@pytest.mark.parametrize(
    ("speed", "from_s", "to_s", "message"),
    [
        (0.0, 0.0, None, "--speed must be above 0"),
        (float("nan"), 0.0, None, "--speed must be above 0"),
        (1.0, 60.0, None, r"--from 60 lies outside the episode, 0 to 60 s"),
        (1.0, -1.0, None, "--from -1 lies outside"),
        (1.0, 10.0, 10.0, "--to 10 must lie above --from 10"),
        (1.0, 10.0, 61.0, "--to 61 must lie above --from 10 and at most at 60 s"),
        (1.0, 10.2, 10.8, "no decision falls between 10.2 and 10.8 s"),
    ],
)
def test_a_film_that_cannot_be(speed: float, from_s: float, to_s: float | None, message: str) -> None:
    with pytest.raises(PrfaasError, match=message):
        plan_film(SHORT, speed, from_s, to_s)


def test_too_many_pictures() -> None:
    with pytest.raises(PrfaasError, match="3,601 pictures; at most 2,000: raise --speed"):
        plan_film(load_scenario("paper"), 1.0, 0.0, 3600.0)


def test_frames_are_those_of_the_episode_and_repeat() -> None:
    film = plan_film(SHORT, 100.0, 20.0, 60.0)
    made = list(frames(SHORT, "earliest_finish", 5, "simpy", film))
    again = list(frames(SHORT, "earliest_finish", 5, "simpy", film))
    assert len(made) == film.n_frames == 5
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))
    assert len({f.shape for f in made}) == 1
    assert len({f.tobytes() for f in made}) == 5
    # what was not shown was simulated all the same
    whole = list(frames(SHORT, "earliest_finish", 5, "simpy", plan_film(SHORT, 100.0, 0.0, 60.0)))
    assert np.array_equal(whole[2], made[0])
    assert not np.array_equal(made[0], next(frames(SHORT, "earliest_finish", 6, "simpy", film)))
    assert not np.array_equal(made[-1], list(frames(SHORT, "always", 5, "simpy", film))[-1])


def test_the_command_writes_a_gif(tmp_path: Path) -> None:
    out = tmp_path / "film.gif"
    result = CliRunner().invoke(
        app, [*ARGUMENTS, "--out", str(out), "--speed", "50", "--from", "10", "--to", "30"]
    )
    assert result.exit_code == 0, result.output
    assert "5 pictures, 0.5 s of film, 10 to 30 s of paper" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["film.gif"]
    with Image.open(out) as film:
        assert film.n_frames == 5
        assert film.info["duration"] == 100
        assert film.info["loop"] == 0
        first = next(frames(SHORT, "earliest_finish", 0, "simpy", plan_film(SHORT, 50.0, 10.0, 30.0)))
        assert film.size == (first.shape[1], first.shape[0])
        shown = np.asarray(film.convert("RGB"), dtype=int)
        assert np.abs(shown - first).mean() < 1.0  # the palette holds every colour


def test_equal_arguments_write_equal_files(tmp_path: Path) -> None:
    for name in ("a.gif", "b.gif"):
        film = plan_film(SHORT, 100.0, 0.0, 30.0)
        write_film(tmp_path / name, frames(SHORT, "static", 1, "simpy", film), film)
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


def test_a_failure_leaves_the_earlier_film(tmp_path: Path) -> None:
    out = tmp_path / "film.gif"
    out.write_bytes(b"earlier")

    def fails() -> Iterator[Any]:
        yield np.zeros((2, 2, 3), dtype=np.uint8)
        raise PrfaasError("the policy gave up")

    with pytest.raises(PrfaasError, match="gave up"):
        write_film(out, fails(), Film(1.0, 10.0, 0.0, 5.0))
    assert out.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["film.gif"]


def test_mp4_without_its_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path / "film.mp4")])
    assert isinstance(result.exception, PrfaasError)
    assert "\n" not in str(result.exception)
    assert re.search(r"pip install 'prfaas-env\[video\]'", str(result.exception))
    assert not list(tmp_path.iterdir())


def test_mp4_gets_every_picture_and_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for imageio-ffmpeg, whose protocol is a generator that takes pictures."""
    seen: dict[str, Any] = {"frames": []}

    def write_frames(path: str, size: tuple[int, int], **options: Any) -> Iterator[None]:
        seen.update(size=size, **options)
        try:
            while True:
                seen["frames"].append((yield))
        finally:
            Path(path).write_bytes(b"film")

    stand_in = types.SimpleNamespace(write_frames=write_frames)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", stand_in)
    film = plan_film(SHORT, 50.0, 0.0, 20.0)
    out = tmp_path / "film.mp4"
    write_film(out, frames(SHORT, "static", 0, "simpy", film), film)
    assert out.read_bytes() == b"film"
    assert len(seen["frames"]) == film.n_frames == 5
    assert seen["fps"] == pytest.approx(10.0)
    assert seen["size"] == (seen["frames"][0].shape[1], seen["frames"][0].shape[0])
    assert [p.name for p in tmp_path.iterdir()] == ["film.mp4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "film.avi"], r"--out film.avi: the name must end in .gif or .mp4"),
        (["--out", "nowhere/film.gif"], "--out nowhere/film.gif: folder nowhere does not exist"),
        (["--out", "film.gif", "--engine", "magic"], "--engine is 'magic'"),
        (["--out", "film.gif", "--policy", "nobody"], "unknown policy 'nobody'"),
        (["--out", "film.gif", "--scenario", "nowhere"], "unknown scenario 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*ARGUMENTS, *arguments])
    assert isinstance(result.exception, PrfaasError), result.output
    assert "\n" not in str(result.exception)
    assert re.search(message, str(result.exception)), result.exception
    assert not list(tmp_path.iterdir())
