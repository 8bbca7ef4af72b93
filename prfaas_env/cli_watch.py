"""`prfaas watch`: a policy through an episode as an animated GIF or an MP4."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from prfaas_env import rendering
from prfaas_env.base import MAX_S, PrfaasError
from prfaas_env.policy import PolicyContext, begin_episode, make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import DEFAULT_ENGINE, ENGINES, check_engine
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.run import EpisodeRun
from prfaas_env.simulator.world import draw_world
from prfaas_env.sites import link_pairs

Frame = NDArray[np.uint8]

#: Most pictures per second of film; a GIF counts hundredths of a second.
MAX_FPS = 10
#: Most pictures of a film: a GIF is put together in memory.
MAX_FRAMES = 2_000
#: Seconds that are shown when nothing is said.
DEFAULT_SPAN_S = 600.0
FORMATS = (".gif", ".mp4")


def watch_command(
    out: Annotated[Path, typer.Option(help="The film, FILE.gif or FILE.mp4.")],
    scenario: Annotated[
        str, typer.Option("--scenario", "-s", help="A shipped name or a path of a YAML file.")
    ] = "paper",
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="NAME[:key=value,...] or module:Class.")
    ] = "static",
    deployment: Annotated[
        str | None, typer.Option(help="Take the deployment of this scenario (homogeneous, naive, ...).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Episode seed.")] = 0,
    speed: Annotated[float, typer.Option(help="Simulated seconds per second of film.")] = 20.0,
    from_s: Annotated[float, typer.Option("--from", help="First simulated second that is shown.")] = 0.0,
    to_s: Annotated[
        float | None,
        typer.Option("--to", help="Last simulated second that is shown; default 600 s after the first."),
    ] = None,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")] = DEFAULT_ENGINE,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: dotted.path=value; repeatable.")
    ] = None,
) -> None:
    """Show both sites, the link, the queues and every decision of a policy as a film."""
    check_engine(engine)
    if out.suffix.lower() not in FORMATS:
        raise PrfaasError(f"--out {out}: the name must end in {' or '.join(FORMATS)}")
    if not out.resolve().parent.is_dir():
        raise PrfaasError(f"--out {out}: folder {out.parent} does not exist")
    what = load_scenario(scenario, deployment=deployment, overrides=overrides or ())
    film = plan_film(what, speed, from_s, to_s)
    try:
        write_film(out, frames(what, policy, seed, engine, film), film)
    except DependencyNotInstalled as error:
        raise PrfaasError(str(error)) from None
    typer.echo(
        f"written: {out} ({film.n_frames} pictures, {film.n_frames * film.frame_s:.1f} s of film, "
        f"{film.from_s:g} to {film.to_s:g} s of {what.name})"
    )


class Film:
    """Which ticks of the fast clock are shown, and for how long.

    `stride` ticks lie between two pictures; `frame_s` is how long each is shown, so that `speed` holds.
    """

    def __init__(self, control_interval_s: float, speed: float, from_s: float, to_s: float) -> None:
        self.from_s, self.to_s = from_s, to_s
        self.first_tick = int(np.ceil(from_s / control_interval_s - 1e-9))
        self.last_tick = int(np.floor(to_s / control_interval_s + 1e-9))
        self.stride = max(1, round(speed / MAX_FPS / control_interval_s))
        # whole hundredths, which is what a GIF can say; below two, viewers slow down
        self.frame_s = max(round(self.stride * control_interval_s / speed, 2), 0.02)

    @property
    def ticks(self) -> range:
        """Ticks that are shown."""
        return range(self.first_tick, self.last_tick + 1, self.stride)

    @property
    def n_frames(self) -> int:
        """Number of pictures."""
        return len(self.ticks)


def plan_film(scenario: Scenario, speed: float, from_s: float, to_s: float | None) -> Film:
    """The film of a part of an episode.

    Raises:
        PrfaasError: times outside the episode, a speed that is not above 0, more than `MAX_FRAMES` pictures.
    """
    horizon_s = scenario.measure.horizon_s
    if not 0 < speed <= MAX_S:
        raise PrfaasError(f"--speed must be above 0, found {speed:g}")
    if not 0 <= from_s < horizon_s:
        raise PrfaasError(f"--from {from_s:g} lies outside the episode, 0 to {horizon_s:g} s")
    end_s = min(from_s + DEFAULT_SPAN_S, horizon_s) if to_s is None else to_s
    if not from_s < end_s <= horizon_s:
        raise PrfaasError(f"--to {end_s:g} must lie above --from {from_s:g} and at most at {horizon_s:g} s")
    film = Film(scenario.control.control_interval_s, speed, from_s, end_s)
    if not film.n_frames:
        raise PrfaasError(
            f"no decision falls between {from_s:g} and {end_s:g} s "
            f"(control.control_interval_s is {scenario.control.control_interval_s:g})"
        )
    if film.n_frames > MAX_FRAMES:
        raise PrfaasError(f"{film.n_frames:,} pictures; at most {MAX_FRAMES:,}: raise --speed or move --to")
    return film


def frames(scenario: Scenario, policy: str, seed: int, engine: str, film: Film) -> Iterator[Frame]:
    """The pictures of a film: the state just after the decision of each tick that is shown.

    Each is RGB, uint8, and all have one shape; equal arguments give equal pictures.
    """
    world = draw_world(scenario, seed)
    run = EpisodeRun(world, engine)
    chosen = make_policy(policy)
    begin_episode(chosen, PolicyContext(scenario, world.schema, 0), run.engine)
    pairs = link_pairs(scenario.deployment)
    title = f"{scenario.name}   {policy}   seed {seed}"
    shown = film.ticks
    end_ns = ns_from_s(scenario.measure.horizon_s)
    for tick in range(shown[-1] + 1):
        if run.engine.now_ns < end_ns:
            run.engine.apply(chosen.decide(run.engine.telemetry()))
        if tick in shown:
            yield rendering.picture(run.engine.telemetry(), pairs, title)
        run.run_until(min((tick + 1) * run.control_ns, end_ns))


# ------------------------------------------------------------------------------------------ files


def write_film(out: Path, pictures: Iterator[Frame], film: Film) -> None:
    """Write pictures as GIF or MP4 by the ending of `out`, whole or not at all.

    Raises:
        DependencyNotInstalled: pillow is missing.
        PrfaasError: imageio-ffmpeg is missing (MP4), the file cannot be written.
    """
    write: Callable[[Path, Iterator[Frame], Film], None] = (
        _write_gif if out.suffix.lower() == ".gif" else _write_mp4
    )
    temporary = out.with_name(f".{out.stem}.tmp{out.suffix.lower()}")
    try:
        write(temporary, pictures, film)
        temporary.replace(out)
    except OSError as error:
        raise PrfaasError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _palette(image_module: Any) -> Any:
    """One palette for all pictures: the colours of `rendering` and steps between text and what is behind it."""
    colours = np.array(rendering.COLOURS, dtype=np.float64)
    paper, panel = colours[0], colours[1]
    steps = [
        ink + (behind - ink) * k / 8
        for ink, behind in itertools.product(colours[2:], (paper, panel))
        for k in range(7)  # a last step would be mistaken for what is behind it
    ]
    table = np.unique(np.rint(np.concatenate((colours, steps))).astype(np.uint8), axis=0)
    flat = np.zeros((256, 3), dtype=np.uint8)
    flat[: len(table)] = table
    image = image_module.new("P", (1, 1))
    image.putpalette(flat.tobytes())
    return image


def _write_gif(path: Path, pictures: Iterator[Frame], film: Film) -> None:
    first = next(pictures)  # names pillow where it is missing
    from PIL import Image

    palette = _palette(Image)
    images = (
        Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame in itertools.chain((first,), pictures)
    )
    next(images).save(
        path,
        format="GIF",
        save_all=True,
        append_images=images,
        duration=round(film.frame_s * 1000),
        loop=0,
        optimize=False,
    )


def _write_mp4(path: Path, pictures: Iterator[Frame], film: Film) -> None:
    try:
        ffmpeg: Any = importlib.import_module("imageio_ffmpeg")
    except ImportError:
        raise PrfaasError(
            "an MP4 needs imageio-ffmpeg: pip install 'prfaas-env[video]'; a .gif needs pillow alone"
        ) from None
    first = next(pictures)
    height, width, _ = first.shape
    writer = ffmpeg.write_frames(
        str(path), (width, height), fps=1.0 / film.frame_s, macro_block_size=2, ffmpeg_log_level="error"
    )
    try:
        writer.send(None)
        for frame in itertools.chain((first,), pictures):
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()
