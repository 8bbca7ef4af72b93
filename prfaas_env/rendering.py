"""The present state as text or as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from prfaas_env.telemetry import Telemetry

_WIDTH, _ROW, _PAD = 720, 28, 12
_INK, _PAPER, _GREY = (32, 36, 42), (255, 255, 255), (226, 229, 233)
_BLUE, _ORANGE, _GREEN, _RED = (46, 111, 187), (222, 137, 40), (58, 140, 88), (190, 62, 62)


def _bars(telemetry: Telemetry) -> list[tuple[str, str, float, tuple[int, int, int]]]:
    """(label, figure, filled share, colour) per row of the picture."""
    rows: list[tuple[str, str, float, tuple[int, int, int]]] = []
    for j, remote in enumerate(telemetry.prfaas):
        share = remote.prefill_busy_instances / max(remote.prefill_instances, 1.0)
        rows.append(
            (
                f"remote {j} prefill",
                f"{remote.prefill_busy_instances:.0f}/{remote.prefill_instances:.0f} busy",
                share,
                _BLUE,
            )
        )
        rows.append((f"remote {j} queue", *_queue(remote.prefill_queue_requests), _RED))
    for k, link in enumerate(telemetry.link):
        figure = (
            f"{link.utilisation_5s * 100:.0f}% of {link.nominal_capacity_bps / 1e9:.0f} Gbps, "
            f"backlog {link.backlog_s:.1f} s"
        )
        rows.append((f"link {k}", figure, link.utilisation_5s, _ORANGE))
    for i, pd in enumerate(telemetry.pd):
        share = pd.prefill_busy_instances / max(pd.prefill_instances, 1.0)
        rows.append(
            (
                f"local {i} prefill",
                f"{pd.prefill_busy_instances:.0f}/{pd.prefill_instances:.0f} busy",
                share,
                _BLUE,
            )
        )
        rows.append((f"local {i} queue", *_queue(pd.prefill_queue_requests), _RED))
        figure = f"{pd.decode_sequences:.0f} sequences on {pd.decode_instances:.0f}"
        rows.append((f"local {i} decode", figure, pd.decode_slot_use, _GREEN))
        rows.append((f"local {i} decode queue", *_queue(pd.decode_queue_requests), _RED))
    return rows


def _queue(requests: float) -> tuple[str, float]:
    return f"{requests:.0f} waiting", float(min(np.log1p(requests) / np.log1p(1000.0), 1.0))


def _decision(telemetry: Telemetry) -> str:
    parts = []
    for i, pd in enumerate(telemetry.pd):
        route = (
            f"threshold {pd.threshold_tokens:,.0f} tokens"
            if pd.threshold_valid
            else f"margin {pd.margin_s:+.1f} s"
        )
        moving = f", {pd.converting_instances:.0f} converting" if pd.converting_instances else ""
        parts.append(
            f"local {i}: {route}, {pd.prefill_instances:.0f} prefill / {pd.decode_instances:.0f} decode{moving}"
        )
    return "; ".join(parts)


def text(telemetry: Telemetry) -> str:
    """Several lines of plain text."""
    lines = [f"t = {telemetry.time_s:.1f} s   {_decision(telemetry)}"]
    for label, figure, share, _ in _bars(telemetry):
        lines.append(f"{label:<22} {'#' * round(share * 30):<30} {figure}")
    return "\n".join(lines)


def show(telemetry: Telemetry) -> None:
    """Print the text."""
    from rich import get_console

    get_console().print(text(telemetry), markup=False, highlight=False, soft_wrap=True)


def picture(telemetry: Telemetry) -> NDArray[np.uint8]:
    """RGB picture, uint8 of shape (height, width, 3); needs pillow (comes with the `train` extra)."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DependencyNotInstalled(
            'rgb_array needs pillow: pip install "prfaas-env[train]" or pip install pillow'
        ) from error
    rows = _bars(telemetry)
    image = Image.new("RGB", (_WIDTH, (len(rows) + 2) * _ROW + 2 * _PAD), _PAPER)
    draw: Any = ImageDraw.Draw(image)
    draw.text((_PAD, _PAD), f"t = {telemetry.time_s:8.1f} s", fill=_INK)
    draw.text((_PAD, _PAD + _ROW), _decision(telemetry), fill=_INK)
    left, right = 170, _WIDTH - 240
    for n, (label, figure, share, colour) in enumerate(rows):
        top = _PAD + (n + 2) * _ROW
        draw.text((_PAD, top + 5), label, fill=_INK)
        draw.rectangle((left, top + 3, right, top + _ROW - 6), fill=_GREY)
        if share > 0:
            draw.rectangle((left, top + 3, left + (right - left) * share, top + _ROW - 6), fill=colour)
        draw.text((right + 12, top + 5), figure, fill=_INK)
    return np.asarray(image, dtype=np.uint8)
