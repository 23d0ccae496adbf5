"""Figures of the report as inline SVG: text in, text out, no library, no script.

Colours are classes of the page's style sheet (``s0`` ... ``s7`` for series), so that one figure serves light and dark
screens. The canvas is 440 units wide: on a phone a unit is about a pixel and text stays readable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["SERIES", "bars", "heat_map", "lines"]

SERIES = 8
"""Number of series colours that the page defines; more series share them."""

_WIDTH = 440
_LEFT, _RIGHT, _TOP = 64, 8, 8
_CELL = 18  # height of a row of the heat map


def _svg(height: float, label: str, body: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *body, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    css = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Horizontal bars.

    Parameters
    ----------
    rows : sequence of (str, float, str)
        Name, value from 0 on, and what is written behind the bar.
    label : str
        What the figure shows, for those who cannot see it.
    """
    left, room = 92, 128  # for the longest role name; for "1234.5 MiB · 16.00 bits"
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    body = []
    for i, (name, value, text) in enumerate(rows):
        y = _TOP + 24 * i
        width = (_WIDTH - left - room) * value / longest
        body += [
            _text(left - 6, y + 13, name, "end"),
            f'<rect class="s0" x="{left}" y="{y}" width="{width:.1f}" height="18" rx="2"/>',
            _text(left + width + 5, y + 13, text, style="dim"),
        ]
    return _svg(_TOP + 24 * len(rows) + 4, label, body)


def lines(series: Mapping[str, Sequence[tuple[int, float]]], label: str, axis: str) -> str:
    """Values over the layers on a logarithmic axis, a line and a colour for each name.

    Parameters
    ----------
    series : mapping of str to sequence of (int, float)
        Layer and value; zeros have no place on the axis and are drawn at its foot.
    label : str
    axis : str
        Name of the horizontal axis.
    """
    points = [p for values in series.values() for p in values]
    positive = [v for _, v in points if v > 0]
    if not points:
        return ""
    low, high, marks = _log_axis(min(positive, default=0.1), max(positive, default=1.0))
    last = max(1, max(x for x, _ in points))
    height, foot = 230, 34
    wide, tall = _WIDTH - _LEFT - _RIGHT, height - _TOP - foot

    def x_of(layer: float) -> float:
        return _LEFT + wide * layer / last

    def y_of(value: float) -> float:
        share = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
        return _TOP + tall * (1 - share)

    body = []
    for mark in marks:
        y = y_of(mark)
        body += [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            _text(_LEFT - 6, y + 4, f"{mark:.0e}".replace("e-0", "e-"), "end", "dim"),
        ]
    body += [_text(x_of(tick), height - foot + 16, str(tick), "middle", "dim") for tick in _ticks(last)]
    body.append(_text(_LEFT + wide / 2, height - 4, axis, "middle", "dim"))
    for i, (name, values) in enumerate(series.items()):
        colour = f"s{i % SERIES}"
        path = " ".join(f"{x_of(x):.1f},{y_of(v):.1f}" for x, v in values)
        body.append(f'<polyline class="line {colour}" points="{path}"/>')
        if len(values) <= 64:
            body += [
                f'<circle class="{colour}" cx="{x_of(x):.1f}" cy="{y_of(v):.1f}" r="2.6">'
                f"<title>{escape(name)}, layer {x}: {v:.3e}</title></circle>"
                for x, v in values
            ]
    return _svg(height, label, body)


def heat_map(cells: Mapping[tuple[str, int], float], label: str, axis: str, unit: str) -> str:
    """A row for each name, a column for each layer; the higher the value, the stronger the colour.

    Parameters
    ----------
    cells : mapping of (str, int) to float
        Name and layer -> value.
    label, axis : str
    unit : str
        Follows the value in a cell's tip.
    """
    if not cells:
        return ""
    names = list(dict.fromkeys(name for name, _ in cells))
    columns = max(layer for _, layer in cells) + 1
    left = 92
    width = (_WIDTH - left - _RIGHT) / columns
    top = max(cells.values()) or 1.0
    gap = 1 if width > 4 else 0
    body = []
    for row, name in enumerate(names):
        y = _TOP + _CELL * row
        body.append(_text(left - 6, y + 13, name, "end"))
        for layer in range(columns):
            value = cells.get((name, layer))
            if value is None:
                continue
            x = left + width * layer
            body.append(
                f'<rect class="s0" x="{x:.2f}" y="{y}" width="{width - gap:.2f}" height="{_CELL - 1}" '
                f'fill-opacity="{0.12 + 0.88 * value / top:.3f}">'
                f"<title>{escape(name)}, layer {layer}: {value:.3f} {escape(unit)}</title></rect>"
            )
            if width >= 34:
                style = "cell strong" if value / top > 0.55 else "cell"
                body.append(_text(x + width / 2, y + 13, f"{value:.2f}", "middle", style))
    foot = _TOP + _CELL * len(names)
    body += [
        _text(left + width * (tick + 0.5), foot + 14, str(tick), "middle", "dim")
        for tick in _ticks(columns - 1)
    ]
    body.append(_text(left + (_WIDTH - left) / 2, foot + 30, axis, "middle", "dim"))
    return _svg(foot + 36, label, body)


def _log_axis(least: float, most: float) -> tuple[float, float, list[float]]:
    """Logarithms of both ends, and the marks: 1, 2, 5, 10 ... that enclose the values, over many decades only tens."""
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    fine = [m * 10.0**d for d in decades for m in (1, 2, 5)]
    low = max(m for m in fine if m <= least)
    high = min(m for m in fine if m >= most and m > low)
    marks = [m for m in fine if low <= m <= high]
    if len(marks) > 8:
        tens = [10.0**d for d in decades if low <= 10.0**d <= high]
        marks = tens[:: max(1, math.ceil(len(tens) / 7))]
    return math.log10(low), math.log10(high), marks


def _ticks(last: int) -> list[int]:
    """At most nine whole numbers from 0 to ``last``."""
    step = max(1, math.ceil(last / 8))
    return list(range(0, last + 1, step))
