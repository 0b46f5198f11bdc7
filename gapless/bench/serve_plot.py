"""A picture of a load run as one SVG: latencies over time, and how they are distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.bench.serve_client import Record

_WIDTH, _HEIGHT = 960, 640
# room for labels around a panel's frame
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 40
_TTFT_COLOUR, _E2E_COLOUR, _ITL_COLOUR = "#1f6fb2", "#d1702b", "#3a8f5c"
_NUM_BINS = 40
# a tail beyond this percentile would leave the histogram one bar
_SHOWN_PERCENTILE = 99.5


@dataclass(frozen=True)
class Panel:
    """A frame in the picture with its own axes, both from 0."""

    x: float
    y: float
    width: float
    height: float
    title: str
    x_label: str
    x_max: float
    y_max: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point of the axes lies in the picture."""
        inner_width = self.width - _LEFT - _RIGHT
        inner_height = self.height - _TOP - _BOTTOM
        return (
            self.x + _LEFT + inner_width * x / self.x_max,
            self.y + self.height - _BOTTOM - inner_height * y / self.y_max,
        )

    def frame(self) -> list[str]:
        """Axes, ticks with their numbers, and title."""
        left, bottom = self.place(0, 0)
        right, top = self.place(self.x_max, self.y_max)
        parts = [_text(left, top - 10, self.title, weight="bold")]
        for tick in ticks(self.y_max):
            _, y = self.place(0, tick)
            parts.append(_line(left, y, right, y, "#e4e4e4"))
            parts.append(_text(left - 6, y + 4, f"{tick:g}", anchor="end"))
        for tick in ticks(self.x_max):
            x, _ = self.place(tick, 0)
            parts.append(_line(x, bottom, x, bottom + 4, "#555"))
            parts.append(_text(x, bottom + 17, f"{tick:g}", anchor="middle"))
        parts.append(_text((left + right) / 2, bottom + 33, self.x_label, anchor="middle"))
        parts.append(_line(left, bottom, right, bottom, "#555"))
        parts.append(_line(left, bottom, left, top, "#555"))
        return parts


def latency_svg(records: Sequence[Record], title: str) -> str:
    """Draw replies that ended as they should, and mark the moments of those that failed."""
    done = [record for record in records if record.failure is None]
    ttfts = [1e3 * (record.ttft or 0.0) for record in done]
    itls = [1e3 * itl for record in done for itl in record.itls]
    half = (_HEIGHT - 40) / 2
    parts = [_text(_LEFT, 24, title, size=15, weight="bold")]
    parts += _over_time(records, Panel(
        0, 40, _WIDTH, half, "latency by the time of sending, ms", "seconds",
        _top([record.start for record in records]),
        _top([1e3 * record.e2e for record in done]),
    ))  # fmt: skip
    parts += _histogram(ttfts, 0, 40 + half, half, "time to first token", _TTFT_COLOUR)
    parts += _histogram(itls, _WIDTH / 2, 40 + half, half, "between events", _ITL_COLOUR)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def ticks(highest: float) -> list[float]:
    """Return round numbers from 0 up to `highest`, between 3 and 7 of them."""
    power = 10.0 ** np.floor(np.log10(highest))
    steps = [factor * power for factor in (0.1, 0.2, 0.5, 1.0, 2.0)]
    step = next(step for step in steps if highest / step < 6)
    return [float(f"{i * step:.6g}") for i in range(int(highest / step) + 1)]


def _over_time(records: Sequence[Record], panel: Panel) -> list[str]:
    parts = panel.frame()
    right, top = panel.place(panel.x_max, panel.y_max)
    for i, (label, colour) in enumerate(
        (("first token", _TTFT_COLOUR), ("whole request", _E2E_COLOUR), ("failed", "#c00"))
    ):
        parts.append(_dot(right - 320 + 110 * i, top - 14, colour))
        parts.append(_text(right - 310 + 110 * i, top - 10, label))
    for record in records:
        if record.failure is not None:
            parts.append(_dot(*panel.place(record.start, 0), "#c00"))
            continue
        parts.append(_dot(*panel.place(record.start, 1e3 * record.e2e), _E2E_COLOUR))
        parts.append(_dot(*panel.place(record.start, 1e3 * (record.ttft or 0.0)), _TTFT_COLOUR))
    return parts


def _histogram(
    values: Sequence[float], x: float, y: float, height: float, what: str, colour: str
) -> list[str]:
    limit = float(np.percentile(values, _SHOWN_PERCENTILE)) if values else 0.0
    x_max = limit or 1.0
    counts, edges = np.histogram(values, bins=_NUM_BINS, range=(0.0, x_max))
    hidden = len(values) - int(counts.sum())
    title = f"{what}: {len(values)}" + (f", {hidden} beyond the axis" if hidden else "")
    panel = Panel(x, y, _WIDTH / 2, height, title, "ms", x_max, _top(counts.tolist()))
    parts = panel.frame()
    for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True):
        left, top = panel.place(float(start), float(count))
        right, bottom = panel.place(float(end), 0.0)
        if count:
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 1, 1):.1f}" '
                f'height="{bottom - top:.1f}" fill="{colour}"/>'
            )
    return parts


def _top(values: Sequence[float]) -> float:
    """Return an axis' end for values from 0."""
    return 1.05 * max(values, default=0.0) or 1.0


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity="0.7"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
