"""Inline SVG charts of the report: strings without scripts, styled by the classes of templates/report.css.

Marks have a <title>, which browsers show on hover. Coordinates are pixels of a
fixed view box; x grows to the right, y downwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from pipelinerl_core.report.markup import template

MAX_POINTS = 400
"""Of a line; a line with more is unreadable."""
Point = tuple[float, float]
Format = Callable[[float], str]

_WIDTH = 520.0
_HEIGHT = 230.0
_LEFT = 50.0
_RIGHT = 14.0
_TOP = 12.0
_BOTTOM = 40.0


@dataclass(frozen=True, slots=True)
class Series:
    """Points with one mark and one colour. css: the class of the colour."""

    name: str
    points: Sequence[Point]
    css: str
    kind: str = "line"
    """line, faint (a thin line behind another), beyond (a thin grey line), dots, or ring (large dots)."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """ring: lower and upper end of a vertical line through each point; empty: no lines."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis. A bound that is None follows from the data."""

    label: str
    text: Format = field(default=lambda value: f"{value:g}")
    low: float | None = None
    high: float | None = None
    is_whole: bool = False
    """Ticks only at whole numbers."""

    def ticks(self, low: float, high: float, count: int) -> list[float]:
        """About `count` values in [low, high] to label."""
        return [tick for tick in nice_ticks(low, high, count) if not self.is_whole or float(tick).is_integer()]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = _HEIGHT

    def px(self, value: float) -> float:
        return _LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (_WIDTH - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        return self.height - _BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.height - _TOP - _BOTTOM)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about `count`, in steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(
    title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis, *, shade_from: float | None = None
) -> str:
    """Lines and dots over two linear axes. shade_from: x from which the area is grey."""
    points = [point for line in series for point in line.points]
    if not points:
        return _empty(title)
    heights = [p[1] for p in points] + [end for line in series for ends in line.intervals if ends for end in ends]
    frame = _Frame(_bounds([p[0] for p in points], x_axis), _bounds(heights, y_axis))
    parts = [_grid(frame, x_axis, y_axis)]
    if shade_from is not None and shade_from < frame.x[1]:
        left = frame.px(max(shade_from, frame.x[0]))
        height = _HEIGHT - _TOP - _BOTTOM
        parts.append(
            f'<rect class="shade" x="{left:.1f}" y="{_TOP}" width="{_WIDTH - _RIGHT - left:.1f}" height="{height}"/>'
        )
    parts += [_mark(frame, line, x_axis, y_axis) for line in series if line.points]
    return _svg(title, parts, _HEIGHT)


def as_file(chart: str, series: Sequence[Series]) -> str:
    """A chart as an SVG document of its own, with its styles and the names of its series."""
    legend = "".join(
        f'<text class="{line.css}" x="60" y="{24 + 13 * index}" style="fill: var(--tone)">{escape(line.name)}</text>'
        for index, line in enumerate(series)
    )
    chart = chart.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace("</svg>", f"{legend}</svg>")
    return chart.replace(">", f"><style>{template('report.css')}</style>", 1)


def bar_chart(
    title: str, bars: Sequence[tuple[float, float, float, str]], x_axis: Axis, y_axis: Axis, *, css: str
) -> str:
    """Bars (left, right, height, hover text); the y axis begins at 0."""
    if not bars:
        return _empty(title)
    x = (min(bar[0] for bar in bars), max(bar[1] for bar in bars))
    frame = _Frame(x, (0.0, max(max(bar[2] for bar in bars) * 1.05, 1e-9)))
    parts = [_grid(frame, x_axis, y_axis)]
    for left, right, height, text in bars:
        x0, x1, y0 = frame.px(left), frame.px(right), frame.py(height)
        gap = min(1.0, (x1 - x0) * 0.1)
        parts.append(
            f'<rect class="fill {css}" x="{x0 + gap:.1f}" y="{y0:.1f}" width="{x1 - x0 - 2 * gap:.1f}" '
            f'height="{max(0.0, frame.py(0) - y0):.1f}"><title>{escape(text)}</title></rect>'
        )
    return _svg(title, parts, _HEIGHT)


@dataclass(frozen=True, slots=True)
class Lane:
    """One role over time: (start, end, css, hover text) intervals in seconds, and labelled instants."""

    name: str
    intervals: Sequence[tuple[float, float, str, str]]
    labels: Sequence[tuple[float, str]] = ()


def lane_chart(title: str, lanes: Sequence[Lane], window: tuple[float, float]) -> str:
    """One band per role over a window of the run, full width."""
    row, width, left = 38.0, 1080.0, 92.0
    height = _TOP + row * len(lanes) + 34.0
    scale = (width - left - _RIGHT) / (window[1] - window[0])

    def px(seconds: float) -> float:
        return left + (min(max(seconds, window[0]), window[1]) - window[0]) * scale

    parts = []
    for tick in nice_ticks(*window, count=10):
        x = px(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - 30:.1f}"/>')
        parts.append(_text("tick", x, height - 14, f"{tick:.4g} s"))
    for index, lane in enumerate(lanes):
        top = _TOP + row * index
        parts.append(_text("lane", 0, top + 18, lane.name, anchor="start"))
        for start, end, css, text in lane.intervals:
            if end < window[0] or start > window[1]:
                continue
            # At least 2 pixels: a pause of milliseconds must be visible in a window of seconds.
            span = max(px(end) - px(start), 2.0)
            parts.append(
                f'<rect class="fill {css}" x="{px(start):.1f}" y="{top + 4:.1f}" width="{span:.1f}" height="20">'
                f"<title>{escape(text)}</title></rect>"
            )
        for at, text in lane.labels:
            if window[0] <= at <= window[1]:
                parts.append(_text("note", px(at), top + 34, text))
    return _svg(title, parts, height, width)


def stacked_bar(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of shares: (name, amount, css)."""
    total = sum(amount for _, amount, _ in parts)
    if total <= 0:
        return _empty(title)
    pieces, x, width = [], 0.0, 1080.0
    for name, amount, css in parts:
        share = amount / total * width
        pieces.append(
            f'<rect class="fill {css}" x="{x:.2f}" y="0" width="{share:.2f}" height="22">'
            f"<title>{escape(name)}: {amount:,.0f} ({amount / total:.1%})</title></rect>"
        )
        x += share
    return _svg(title, pieces, 22.0, width)


def area_chart(
    title: str, xs: Sequence[float], layers: Sequence[tuple[str, str, Sequence[float]]], x_axis: Axis, y_axis: Axis
) -> str:
    """Stacked layers (name, css, height at each x); the y axis begins at 0."""
    if len(xs) < 2 or not layers:
        return _empty(title)
    tops = [sum(heights) for heights in zip(*(layer[2] for layer in layers), strict=True)]
    frame = _Frame((xs[0], xs[-1]), (0.0, max(*tops, 1e-9)))
    parts, floor = [_grid(frame, x_axis, y_axis)], [0.0] * len(xs)
    for name, css, heights in layers:
        roof = [low + height for low, height in zip(floor, heights, strict=True)]
        outline = [*zip(xs, roof, strict=True), *reversed([*zip(xs, floor, strict=True)])]
        points = " ".join(f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in outline)
        text = f"{name}: {y_axis.text(heights[-1])} at the end"
        parts.append(f'<polygon class="fill {css}" points="{points}"><title>{escape(text)}</title></polygon>')
        floor = roof
    return _svg(title, parts, _HEIGHT)


def smooth(points: Sequence[Point], half: int | None = None) -> list[Point]:
    """Centred moving mean over `half` points at each side, shorter at the ends.

    half: None: so many that the mean is over a twentieth of the points, at least three.
    """
    half = max(1, len(points) // 40) if half is None else half
    values = [y for _, y in points]
    return [
        (x, float(np.mean(values[max(0, index - half) : index + half + 1]))) for index, (x, _) in enumerate(points)
    ]


def thousands(value: float) -> str:
    """A number for an axis. Example: 12000.0 -> 12k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS, evenly spaced, with the last point."""
    stride = max(1, -(-len(points) // MAX_POINTS))
    return [*points[:-1:stride], *points[-1:]]


def _bounds(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if high <= low:
        return low - 0.5, low + 0.5
    margin = (high - low) * 0.04
    return (low if axis.low is not None else low - margin), (high if axis.high is not None else high + margin)


def _grid(frame: _Frame, x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks(*frame.y, count=5):
        y = frame.py(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", _LEFT - 7, y + 3.5, y_axis.text(tick), anchor="end"))
    base = frame.height - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base:.1f}" y2="{base:.1f}"/>')
    for tick in x_axis.ticks(*frame.x, count=6):
        parts.append(_text("tick", frame.px(tick), base + 15, x_axis.text(tick)))
    parts.append(_text("label", (_LEFT + _WIDTH - _RIGHT) / 2, frame.height - 5, x_axis.label))
    return "".join(parts)


def _mark(frame: _Frame, series: Series, x_axis: Axis, y_axis: Axis) -> str:
    pixels = [(frame.px(x), frame.py(y)) for x, y in series.points]
    if series.kind in ("line", "faint", "beyond") and len(pixels) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
        return f'<path class="{series.kind} {series.css}" d="{path}"/>'
    radius = 5.0 if series.kind == "ring" else 2.4
    lines = "".join(
        f'<path class="faint {series.css}" d="M{px:.1f} {frame.py(ends[0]):.1f}V{frame.py(ends[1]):.1f}"/>'
        for (px, _), ends in zip(pixels, series.intervals, strict=False)
        if ends is not None
    )
    return lines + "".join(
        f'<circle class="{"ring" if series.kind == "ring" else "fill"} {series.css}" cx="{px:.1f}" cy="{py:.1f}" '
        f'r="{radius}"><title>{escape(f"{series.name}: {y_axis.text(y)} at {x_axis.text(x)}")}</title></circle>'
        for (px, py), (x, y) in zip(pixels, series.points, strict=True)
    )


def _text(css: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], height: float, width: float = _WIDTH) -> str:
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _empty(title: str) -> str:
    return f'<p class="empty">{escape(title)}: nothing recorded.</p>'
