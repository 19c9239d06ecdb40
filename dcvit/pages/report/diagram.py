"""Reliability diagram as SVG: accuracy over confidence, and the distribution of confidence below it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from dcvit.pages.report.html import tag
from dcvit.pages.report.measures import Bin

WIDTH, HEIGHT = 420, 430
LEFT, RIGHT, TOP = 46, 408, 12  # the edges of both plots in SVG units
BOTTOM = 302  # of the plot of accuracy
COUNTS_TOP, COUNTS_BOTTOM = 322, 384
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def reliability_diagram(bins: Sequence[Bin], summary: str) -> ET.Element:
    """Return the diagram as an SVG element; `summary` is its text for readers who do not see it."""
    highest = max([b.examples for b in bins] + [1])
    parts = [*_axes(), _line(0, 0, 1, 1, "ideal")]
    for b in bins:
        if b.accuracy is None or b.confidence is None:
            continue
        text = (
            f"confidence {b.low:.2f} to {b.high:.2f}: {b.examples:,} images, mean confidence {b.confidence:.3f}, "
            f"accuracy {b.accuracy:.3f}"
        )
        share = b.examples / highest * (COUNTS_BOTTOM - COUNTS_TOP)
        bar = tag("title", text)
        parts += [
            tag("g", bar, _bar(b, _y(b.accuracy), BOTTOM, "accuracy"), _bar(b, TOP, BOTTOM, "hover")),
            _bar(b, COUNTS_BOTTOM - share, COUNTS_BOTTOM, "count"),
            _line(b.low + 0.006, b.confidence, b.high - 0.006, b.confidence, "confidence"),
        ]
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=summary, class_="diagram")


def _x(value: float) -> float:
    return round(LEFT + value * (RIGHT - LEFT), 2)


def _y(value: float) -> float:
    return round(BOTTOM - value * (BOTTOM - TOP), 2)


def _bar(b: Bin, top: float, bottom: float, kind: str) -> ET.Element:
    """Return an SVG rectangle as wide as a bin, from `top` to `bottom` in the diagram; `kind` is its CSS class."""
    x = _x(b.low) + 1
    size = {"width": f"{_x(b.high) - x - 1:.2f}", "height": f"{bottom - top:.2f}"}
    return tag("rect", x=f"{x:.2f}", y=f"{top:.2f}", class_=kind, **size)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> ET.Element:
    """Return an SVG line between two points (confidence, accuracy); `kind` is its CSS class."""
    return tag("line", x1=f"{_x(x1)}", y1=f"{_y(y1)}", x2=f"{_x(x2)}", y2=f"{_y(y2)}", class_=kind)


def _axes() -> list[ET.Element]:
    """Return the SVG elements of the axes: grid, ticks and names."""
    parts = []
    for value in TICKS:
        x, y = _x(value), _y(value)
        parts += [
            _line(0, value, 1, value, "grid"),
            tag("text", f"{value:g}", x=LEFT - 8, y=f"{y + 4}", text_anchor="end"),
            tag("text", f"{value:g}", x=f"{x}", y=COUNTS_BOTTOM + 18, text_anchor="middle"),
        ]
    floor = {"x1": LEFT, "x2": RIGHT, "y1": COUNTS_BOTTOM, "y2": COUNTS_BOTTOM}
    names = (("accuracy", (TOP + BOTTOM) // 2), ("images", (COUNTS_TOP + COUNTS_BOTTOM) // 2))
    return [
        *parts,
        tag("line", class_="grid", **floor),
        *(tag("text", n, transform=f"translate(11 {y}) rotate(-90)", text_anchor="middle") for n, y in names),
        tag("text", "confidence", x=(LEFT + RIGHT) // 2, y=HEIGHT - 8, text_anchor="middle"),
    ]
