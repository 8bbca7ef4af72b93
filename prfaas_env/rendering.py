"""The present state as text or as a picture, from telemetry alone: nothing is shown that a scheduler cannot see."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from prfaas_env.sites import LinkPairs
from prfaas_env.telemetry import Telemetry

Colour = tuple[int, int, int]

# ---------------------------------------------------------------------------------------------- text


def _bars(telemetry: Telemetry, pairs: LinkPairs | None) -> list[tuple[str, str, float]]:
    """(label, figure, filled share) per row of the text."""
    rows: list[tuple[str, str, float]] = []
    for j, remote in enumerate(telemetry.prfaas):
        share = remote.prefill_busy_instances / max(remote.prefill_instances, 1.0)
        busy = f"{remote.prefill_busy_instances:.0f}/{remote.prefill_instances:.0f} busy"
        rows.append((f"remote {j} prefill", busy, share))
        rows.append(
            (f"remote {j} queue", *_queue(remote.prefill_queue_requests, remote.prefill_queue_work_s))
        )
    for k, link in enumerate(telemetry.link):
        rows.append((_link_name(k, pairs), _link_figure(link), link.utilisation_5s))
    for i, pd in enumerate(telemetry.pd):
        share = pd.prefill_busy_instances / max(pd.prefill_instances, 1.0)
        busy = f"{pd.prefill_busy_instances:.0f}/{pd.prefill_instances:.0f} busy"
        rows.append((f"local {i} prefill", busy, share))
        rows.append((f"local {i} queue", *_queue(pd.prefill_queue_requests, pd.prefill_queue_work_s)))
        figure = f"{pd.decode_sequences:.0f} sequences on {pd.decode_instances:.0f}"
        rows.append((f"local {i} decode", figure, pd.decode_slot_use))
        rows.append((f"local {i} decode queue", *_queue(pd.decode_queue_requests, pd.decode_queue_work_s)))
    return rows


def _link_name(k: int, pairs: LinkPairs | None) -> str:
    return f"link {k}" if pairs is None else f"link {k} ({pairs[k][0]} to {pairs[k][1]})"


def _link_figure(link: Any) -> str:
    return (
        f"{link.utilisation_5s * 100:.0f}% of {link.nominal_capacity_bps / 1e9:.0f} Gbps, "
        f"backlog {link.backlog_s:.1f} s"
    )


def _queue(requests: float, work_s: float) -> tuple[str, float]:
    work = f", {work_s:,.0f} s of work" if work_s >= 0.5 else ""
    return f"{requests:.0f} waiting{work}", _log_share(requests)


def _log_share(requests: float) -> float:
    """Length of a queue on a bar that ends at 1,000."""
    return float(min(np.log1p(requests) / np.log1p(1000.0), 1.0))


def _route(pd: Any) -> str:
    return (
        f"threshold {pd.threshold_tokens:,.0f} tokens"
        if pd.threshold_valid
        else f"margin {pd.margin_s:+.1f} s"
    )


def _decision(telemetry: Telemetry) -> str:
    parts = []
    for i, pd in enumerate(telemetry.pd):
        moving = f", {pd.converting_instances:.0f} converting" if pd.converting_instances else ""
        parts.append(
            f"local {i}: {_route(pd)}, {pd.prefill_instances:.0f} prefill / {pd.decode_instances:.0f} decode{moving}"
        )
    return "; ".join(parts)


def text(telemetry: Telemetry, pairs: LinkPairs | None = None) -> str:
    """Several lines of plain text.

    Args:
        telemetry: the reading.
        pairs: places of the clusters that each link joins (`sites.link_pairs`); without them links have numbers only.
    """
    lines = [f"t = {telemetry.time_s:.1f} s   {_decision(telemetry)}"]
    for label, figure, share in _bars(telemetry, pairs):
        lines.append(f"{label:<22} {'#' * round(share * 30):<30} {figure}")
    return "\n".join(lines)


def show(telemetry: Telemetry, pairs: LinkPairs | None = None) -> None:
    """Print the text."""
    from rich import get_console

    get_console().print(text(telemetry, pairs), markup=False, highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------- picture

_PAPER, _PANEL, _INK, _SOFT, _EMPTY = (
    (255, 255, 255),
    (244, 246, 248),
    (29, 33, 38),
    (91, 100, 110),
    (216, 220, 225),
)
_BLUE, _GREEN, _ORANGE, _RED, _VIOLET = (
    (46, 111, 187),
    (58, 140, 88),
    (222, 137, 40),
    (190, 62, 62),
    (122, 91, 166),
)
#: Every colour of a picture, for a palette that is the same in all frames.
COLOURS: tuple[Colour, ...] = (_PAPER, _PANEL, _INK, _SOFT, _EMPTY, _BLUE, _GREEN, _ORANGE, _RED, _VIOLET)

_WIDTH = 1000
_PAD, _TOP, _BOTTOM, _GAP = 16, 58, 34, 14
_REMOTE_H, _LOCAL_H, _LINK_H = 132, 250, 74
_SIDE_W, _LINK_W = 320, 240
#: Most instances that are drawn one by one; more become a bar.
_MAX_SQUARES = 22
_SQUARE = 11
_TEXT, _SMALL, _TITLE = 14, 12, 17


@dataclass(frozen=True)
class _Layout:
    """Where everything is; it depends on the numbers of clusters and links alone, so frames have one size."""

    height: int
    remote_y: tuple[int, ...]
    link_y: tuple[int, ...]
    local_y: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def _layout(n_remote: int, n_links: int, n_local: int) -> _Layout:
    def stack(n: int, height: int) -> int:
        return n * height + max(n - 1, 0) * _GAP

    inner = max(stack(n_remote, _REMOTE_H), stack(n_links, _LINK_H), stack(n_local, _LOCAL_H))

    def tops(n: int, height: int) -> tuple[int, ...]:
        start = _TOP + (inner - stack(n, height)) // 2
        return tuple(start + k * (height + _GAP) for k in range(n))

    height = _TOP + inner + _BOTTOM
    height += height % 2  # video codecs want even sizes
    return _Layout(height, tops(n_remote, _REMOTE_H), tops(n_links, _LINK_H), tops(n_local, _LOCAL_H))


class _Canvas:
    """A picture that is being drawn."""

    def __init__(self, width: int, height: int) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise DependencyNotInstalled(
                'rgb_array needs pillow: pip install "prfaas-env[render]" or pip install pillow'
            ) from error
        self.image = Image.new("RGB", (width, height), _PAPER)
        self._draw: Any = ImageDraw.Draw(self.image)

    def write(
        self, x: float, y: float, words: str, colour: Colour = _INK, size: int = _TEXT, anchor: str = "la"
    ) -> None:
        self._draw.text((x, y), words, fill=colour, font=_font(size), anchor=anchor)

    def clipped(self, x: float, y: float, words: str, width: float, size: int, colour: Colour = _INK) -> None:
        """Text that ends in dots where it would be wider than `width`."""
        font = _font(size)
        shown = words
        while len(shown) > 1 and font.getlength(shown) > width:
            shown = f"{shown[:-4]}..." if shown.endswith("...") else f"{shown[:-3]}..."
        self.write(x, y, shown, colour, size)

    def box(self, x: float, y: float, w: float, h: float, colour: Colour, edge: Colour | None = None) -> None:
        self._draw.rectangle((x, y, x + w, y + h), fill=colour, outline=edge)

    def panel(self, x: float, y: float, w: float, h: float) -> None:
        self._draw.rounded_rectangle((x, y, x + w, y + h), radius=8, fill=_PANEL, outline=_EMPTY)

    def line(self, points: list[tuple[float, float]], colour: Colour, width: int) -> None:
        self._draw.line(points, fill=colour, width=width, joint="curve")

    def bar(self, x: float, y: float, w: float, h: float, share: float, colour: Colour) -> None:
        """A bar filled to `share`."""
        self.box(x, y, w, h, _EMPTY)
        filled = round(w * min(max(share, 0.0), 1.0))
        if filled > 0:
            self.box(x, y, filled, h, colour)

    def instances(self, x: float, y: float, w: float, groups: list[tuple[float, Colour, bool]]) -> None:
        """Instances in a row, as squares or, beyond `_MAX_SQUARES`, as one bar: (how many, colour, at work)."""
        total = sum(n for n, _, _ in groups)
        if total <= _MAX_SQUARES:
            at = x
            for n, colour, busy in groups:
                for _ in range(round(n)):
                    self.box(at, y, _SQUARE, _SQUARE, colour if busy else _PAPER, colour)
                    at += _SQUARE + 3
            return
        at = x
        for n, colour, busy in groups:
            part = w * n / total
            if part > 0:
                self.box(at, y, part, _SQUARE, colour if busy else _PAPER, colour)
            at += part

    def queue(self, x: float, y: float, label: str, requests: float, work_s: float, oldest_s: float) -> None:
        """A labelled queue: figures above a bar on a log scale."""
        figure, share = _queue(requests, work_s)
        oldest = f", oldest {oldest_s:,.0f} s" if oldest_s >= 0.5 else ""
        words = f"{label}: {figure}{oldest}"
        self.clipped(x, y, words, _SIDE_W - 2 * 12, _SMALL, _INK if requests else _SOFT)
        self.bar(x, y + 17, _SIDE_W - 2 * 12, 8, share, _RED)


@functools.lru_cache(maxsize=4)
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _remote(canvas: _Canvas, x: float, y: float, j: int, remote: Any) -> None:
    canvas.panel(x, y, _SIDE_W, _REMOTE_H)
    left = x + 12
    canvas.write(left, y + 9, f"Remote {j}: prefill only", size=_TEXT)
    busy, all_of = remote.prefill_busy_instances, remote.prefill_instances
    canvas.write(left, y + 33, f"prefill  {busy:.0f} of {all_of:.0f} busy", _SOFT, _SMALL)
    canvas.instances(
        left, y + 53, _SIDE_W - 24, [(busy, _BLUE, True), (max(all_of - busy, 0.0), _BLUE, False)]
    )
    canvas.queue(
        left, y + 82, "queue", remote.prefill_queue_requests, remote.prefill_queue_work_s,
        remote.prefill_queue_oldest_s,
    )  # fmt: skip


def _local(canvas: _Canvas, x: float, y: float, i: int, pd: Any) -> None:
    canvas.panel(x, y, _SIDE_W, _LOCAL_H)
    left, width = x + 12, _SIDE_W - 24
    canvas.write(left, y + 9, f"Local {i}", size=_TEXT)
    rate = f"{pd.arrival_rate_30s_rps:.1f} req/s in" if pd.arrivals_valid else ""
    canvas.write(x + _SIDE_W - 12, y + 11, rate, _SOFT, _SMALL, "ra")
    canvas.write(left, y + 32, _route(pd), _VIOLET, _TEXT)
    _decision_scale(canvas, left, y + 54, width, pd)
    prefill, decode, moving = pd.prefill_instances, pd.decode_instances, pd.converting_instances
    turning = f",  {moving:.0f} converting" if moving else ""
    canvas.write(
        left,
        y + 76,
        f"{prefill:.0f} prefill,  {decode:.0f} decode{turning}",
        _ORANGE if moving else _SOFT,
        _SMALL,
    )
    canvas.instances(
        left,
        y + 95,
        width,
        [
            (pd.prefill_busy_instances, _BLUE, True),
            (max(prefill - pd.prefill_busy_instances, 0.0), _BLUE, False),
            (moving, _ORANGE, True),
            (pd.decode_busy_instances, _GREEN, True),
            (max(decode - pd.decode_busy_instances, 0.0), _GREEN, False),
        ],
    )
    canvas.queue(
        left,
        y + 119,
        "prefill queue",
        pd.prefill_queue_requests,
        pd.prefill_queue_work_s,
        pd.prefill_queue_oldest_s,
    )
    canvas.write(
        left,
        y + 159,
        f"decode: {pd.decode_sequences:.0f} sequences, {pd.decode_slot_use:.0%} of slots",
        _INK,
        _SMALL,
    )
    canvas.bar(left, y + 176, width, 8, pd.decode_slot_use, _GREEN)
    canvas.queue(
        left,
        y + 199,
        "decode queue",
        pd.decode_queue_requests,
        pd.decode_queue_work_s,
        pd.decode_queue_oldest_s,
    )


def _decision_scale(canvas: _Canvas, x: float, y: float, w: float, pd: Any) -> None:
    """A mark for the threshold (log, 1,000 to 131,072 tokens) or the margin (symmetric log, -30 to 30 s)."""
    canvas.box(x, y + 5, w, 3, _EMPTY)
    if pd.threshold_valid:
        share = np.log(max(pd.threshold_tokens, 1.0) / 1000.0) / np.log(131.072)
    else:
        share = 0.5 + 0.5 * np.sign(pd.margin_s) * np.log1p(abs(pd.margin_s)) / np.log1p(30.0)
        canvas.box(x + w / 2, y + 2, 1, 9, _SOFT)
    at = x + w * float(min(max(share, 0.0), 1.0))
    canvas.box(at - 3, y, 6, 13, _VIOLET)


def _link(canvas: _Canvas, x: float, y: float, name: str, link: Any) -> None:
    canvas.write(x, y + 2, name, _INK, _SMALL)
    canvas.write(
        x + _LINK_W,
        y + 2,
        f"{link.utilisation_5s:.0%} of {link.nominal_capacity_bps / 1e9:g} Gbps",
        _SOFT,
        _SMALL,
        "ra",
    )
    canvas.bar(x, y + 21, _LINK_W, 14, link.utilisation_5s, _ORANGE)
    if link.observed_valid and link.nominal_capacity_bps > 0:
        at = x + _LINK_W * min(link.observed_capacity_bps / link.nominal_capacity_bps, 1.0)
        canvas.box(at - 1, y + 17, 2, 22, _INK)  # what the wire has shown to carry
    backlog = (
        f"backlog {link.backlog_s:.1f} s, {link.backlog_bytes / 1e9:.1f} GB, {link.open_flows:.0f} flows"
    )
    canvas.write(x, y + 44, backlog, _RED if link.backlog_s > 5 else _SOFT, _SMALL)


def _connect(canvas: _Canvas, start: tuple[float, float], end: tuple[float, float], share: float) -> None:
    middle = (start[0] + end[0]) / 2
    points = [start, (middle, start[1]), (middle, end[1]), end]
    canvas.line(points, _ORANGE if share > 0.005 else _EMPTY, 1 + round(5 * min(share, 1.0)))


def picture(telemetry: Telemetry, pairs: LinkPairs | None = None, title: str = "") -> NDArray[np.uint8]:
    """Both sites, links, queues, decisions and roles as a picture; equal readings give equal pictures.

    Args:
        telemetry: the reading.
        pairs: places of the clusters that each link joins (`sites.link_pairs`); without them no lines are drawn.
        title: a line at the top, behind the time.

    Returns:
        RGB, uint8 of shape (height, 1000, 3); the height depends on the numbers of clusters and links alone.

    Raises:
        DependencyNotInstalled: pillow is missing (extra `render`).
    """
    layout = _layout(len(telemetry.prfaas), len(telemetry.link), len(telemetry.pd))
    canvas = _Canvas(_WIDTH, layout.height)
    canvas.write(_PAD, 16, f"t = {telemetry.time_s:,.1f} s", size=_TITLE)
    canvas.clipped(_PAD + 170, 19, title, _WIDTH - 2 * _PAD - 170, _TEXT, _SOFT)
    link_x = (_WIDTH - _LINK_W) // 2
    local_x = _WIDTH - _PAD - _SIDE_W
    for k, link in enumerate(telemetry.link):
        if pairs is not None:
            y = layout.link_y[k] + 28.0
            j, i = pairs[k]
            remote_y = layout.remote_y[j] + _REMOTE_H / 2
            local_y = layout.local_y[i] + _LOCAL_H / 2
            _connect(canvas, (_PAD + _SIDE_W, remote_y), (link_x - 6, y), link.utilisation_5s)
            _connect(canvas, (link_x + _LINK_W + 6, y), (local_x, local_y), link.utilisation_5s)
    if not telemetry.prfaas:
        canvas.write(_PAD, layout.height / 2 - 8, "no remote site, no link", _SOFT)
    for j, remote in enumerate(telemetry.prfaas):
        _remote(canvas, _PAD, layout.remote_y[j], j, remote)
    for k, link in enumerate(telemetry.link):
        name = f"link {k}" if pairs is None else f"remote {pairs[k][0]} to local {pairs[k][1]}"
        _link(canvas, link_x, layout.link_y[k], name, link)
    for i, pd in enumerate(telemetry.pd):
        _local(canvas, local_x, layout.local_y[i], i, pd)
    _legend(canvas, layout.height - 24)
    return np.asarray(canvas.image, dtype=np.uint8)


def _legend(canvas: _Canvas, y: float) -> None:
    x = float(_PAD)
    for colour, words in (
        (_BLUE, "prefills"),
        (_GREEN, "decodes"),
        (_ORANGE, "converts; link in use"),
        (_RED, "waiting (log scale to 1,000)"),
        (_VIOLET, "decision"),
        (_INK, "mark on the link: observed capacity"),
    ):
        canvas.box(x, y + 2, 9, 9, colour)
        canvas.write(x + 15, y, words, _SOFT, _SMALL)
        x += 15 + _font(_SMALL).getlength(words) + 18
    canvas.write(_WIDTH - _PAD, y, "hollow: idle", _SOFT, _SMALL, "ra")
