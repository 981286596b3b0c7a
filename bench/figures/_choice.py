"""Speed, closeness to the hard top-k and quality of the gradient of every method in one figure, from three benchmarks' data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from bench.choosing import SHAPE
from bench.common import load, same
from bench.figures._style import COLOURS, ORDERED, foot, plain_log, subplots
from bench.temperature import curve

Box = tuple[float, float, float, float]


class Choice(NamedTuple):
    """One method: its cost in softmaxes (forward + backward), and at its best temperature how it learns and how hard it is."""

    name: str
    cost: float | None
    cosine: float  # between its gradient and that of the smoothed hard objective
    solved: float  # share of toy problems solved
    gap: float  # distance of the mask to the hard one at the temperature of the best cosine
    tau: float


def choices() -> list[Choice]:
    """Every method with data in all of the quality and gradient benchmarks."""
    quality, gradient, speed = load("quality"), load("gradient"), load("choosing")
    names = dict.fromkeys(row["what"] for row in gradient if "test" in row)
    return [_choice(name, quality, gradient, speed) for name in names if any(same(row, what=name) for row in quality)]


def _choice(name: str, quality: list[dict[str, Any]], gradient: list[dict[str, Any]], speed: list[dict[str, Any]]) -> Choice:
    best = max((row for row in gradient if same(row, what=name, test="agreement", hard=False)), key=lambda row: row["cosine"])
    solved = max(row["solved"] for row in gradient if same(row, what=name, test="toy"))
    line = curve(row for row in quality if row["what"] == name)
    gap = min(line, key=lambda point: abs(math.log(point[0] / best["tau"])))[1]
    return Choice(name, cost(name, speed), best["cosine"], solved, gap, best["tau"])


def cost(name: str, timed: list[dict[str, Any]]) -> float | None:
    """Softmaxes forward + backward on many short rows."""
    return next((row["ratio"] for row in timed if same(row, what=name, mode="forward+backward") and "ratio" in row), None)


def draw() -> Any:
    """Two panels, each with a name beside every dot."""
    figure, axes = subplots(1, 2, size=(10, 4.4))
    found = choices()
    panels = [{choice: choice.cost for choice in found if choice.cost is not None}, {choice: choice.gap for choice in found}]
    axes[0].set(xscale="log", xlabel="cost in softmaxes, forward + backward", ylabel="agreement of the gradient (cosine)")
    plain_log(axes[0].xaxis, (1, 2, 5, 10, 20, 50, 100, 200, 500))
    axes[0].set_title(f"speed ({SHAPE}) and gradient")
    axes[1].set(xlabel="distance of the mask to the hard top-k at that temperature")
    axes[1].set_title("closeness and gradient")
    for axis, places in zip(axes, panels, strict=True):
        _dots(axis, places)
    for colour, label in ((COLOURS[0], "mask methods"), (COLOURS[1], "methods by place")):
        axes[0].plot([], [], "o", color=colour, label=label)
    axes[0].legend(loc="lower left")
    foot(figure, load("gradient"))
    figure.draw_without_rendering()  # only then are the dots where they stay
    for axis, places in zip(axes, panels, strict=True):
        _names(axis, places)
    return figure


def _dots(axis: Any, places: dict[Choice, float]) -> None:
    axis.margins(x=0.16, y=0.06)
    for choice, x in places.items():
        axis.plot(x, choice.cosine, "o", color=COLOURS[1] if choice.name in ORDERED else COLOURS[0])


def _names(axis: Any, places: dict[Choice, float]) -> None:
    taken = [_box(axis, x, choice.cosine, -3, -3, 6) for choice, x in places.items()]
    for choice, x in sorted(places.items(), key=lambda place: -place[0].cosine):
        _name(axis, x, choice, taken)


def _name(axis: Any, x: float, choice: Choice, taken: list[Box]) -> None:
    """The name of a dot at the first of some places around it where it covers no dot and no other name."""
    width = 4.6 * len(choice.name)
    spots = [(right, up) for up in (-3, 4, -10, 11, -17, 18) for right in (6, -6 - width)]
    boxes = {spot: _box(axis, x, choice.cosine, *spot, width) for spot in spots}
    spot = next((spot for spot, box in boxes.items() if not any(_meet(box, other) for other in taken)), spots[0])
    taken.append(boxes[spot])
    axis.annotate(choice.name, (x, choice.cosine), xytext=spot, textcoords="offset points", fontsize=7).set_in_layout(False)


def _box(axis: Any, x: float, y: float, right: float, up: float, width: float, height: float = 7) -> Box:
    """In points: left, bottom, right, top."""
    a, b = axis.transData.transform((x, y)) * 72 / axis.figure.dpi
    return a + right, b + up, a + right + width, b + up + height


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
