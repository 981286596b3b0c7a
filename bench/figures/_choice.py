"""Speed, closeness to the hard top-k and quality of the gradient of every method in one figure, from three benchmarks' data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from bench.common import load, same
from bench.figures._style import COLOURS, ORDERED, foot, subplots
from bench.temperature import curve

SHAPE = "4096x64"  # the shape that nearly every method was timed at


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
    quality, gradient, speed = load("quality"), load("gradient"), load("speed")
    names = dict.fromkeys(row["what"] for row in gradient if "test" in row)
    return [_choice(name, quality, gradient, speed) for name in names if any(same(row, what=name) for row in quality)]


def _choice(name: str, quality: list[dict[str, Any]], gradient: list[dict[str, Any]], speed: list[dict[str, Any]]) -> Choice:
    best = max((row for row in gradient if same(row, what=name, test="agreement", hard=False)), key=lambda row: row["cosine"])
    solved = max(row["solved"] for row in gradient if same(row, what=name, test="toy"))
    line = curve(row for row in quality if row["what"] == name)
    gap = min(line, key=lambda point: abs(math.log(point[0] / best["tau"])))[1]
    return Choice(name, cost(name, speed), best["cosine"], solved, gap, best["tau"])


def cost(name: str, speed: list[dict[str, Any]]) -> float | None:
    """Softmaxes forward + backward on many short rows, with the native kernels where there are any."""
    fits = {"what": name, "shape": SHAPE, "count": "n/16", "dist": "normal", "dtype": "float32", "threads": 1, "mode": "forward+backward"}
    found = [row for row in speed if same(row, **fits) and "ratio" in row]
    native = [row for row in found if row["kernels"] == "on"]
    return (native or found)[0]["ratio"] if found else None


def draw() -> Any:
    figure, axes = subplots(1, 2, size=(10, 4.4))
    for index, choice in enumerate(sorted(choices(), key=lambda choice: choice.cosine)):
        if choice.cost is not None:
            _point(axes[0], choice.cost, choice, index)
        _point(axes[1], choice.gap, choice, index)
    axes[0].set(xscale="log", xlabel="cost in softmaxes, forward + backward", ylabel="agreement of the gradient (cosine)")
    axes[0].set_title(f"speed ({SHAPE}) and gradient")
    axes[1].set(xlabel="distance of the mask to the hard top-k at that temperature")
    axes[1].set_title("closeness and gradient")
    for colour, label in ((COLOURS[0], "mask methods"), (COLOURS[1], "methods by place")):
        axes[0].plot([], [], "o", color=colour, label=label)
    axes[0].legend(loc="lower left")
    foot(figure, load("gradient"))
    return figure


def _point(axis: Any, x: float, choice: Choice, index: int) -> None:
    """A dot with its name, in turns above and below, so that neighbours can be read."""
    axis.plot(x, choice.cosine, "o", color=COLOURS[1] if choice.name in ORDERED else COLOURS[0])
    axis.annotate(choice.name, (x, choice.cosine), xytext=(5, 3 if index % 2 else -8), textcoords="offset points", fontsize=7)
