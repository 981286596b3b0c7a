"""The one look of all figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Okabe and Ito's palette, which colour-blind readers can tell apart, and what a figure with many lines goes on with.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7B4173", "#637939")
DASHES = ("-", "--", ":", "-.")
ORDERED = ("counting", "halving", "iterative", "network", "neuralsort", "sequential", "sinkhorn", "softrank", "softsort")
OURS, BASE, PEER = COLOURS[0], "#6B6B6B", COLOURS[1]

_PARAMETERS = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.hashsalt": "khot",
}


def style() -> Any:
    """A context in which figures are drawn in the common style; the global state of matplotlib is left as it was."""
    import matplotlib

    matplotlib.use("Agg")
    return matplotlib.rc_context(_PARAMETERS)


def subplots(rows: int = 1, columns: int = 1, *, size: tuple[float, float], **given: Any) -> tuple[Any, Any]:
    """Figure and axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", **given)


def look(index: int) -> dict[str, Any]:
    """Colour and dash of the ``index``-th line."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def families(methods: Sequence[str]) -> dict[str, list[str]]:
    """The methods in two groups, so that no panel has more lines than there are colours."""
    ordered = [method for method in methods if method in ORDERED]
    return {"masks": [method for method in methods if method not in ORDERED], "by place": ordered}


def foot(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Where the numbers come from, in small print."""
    row = rows[-1]
    text = f"{row['cpu']}, {row['cores']} cores, {row['isa']}; torch {row['torch']}, khot {row['khot']} ({row['commit']})"
    figure.supxlabel(text, fontsize=6.5, color="#8A8A8A", x=0.99, ha="right")


def plain_log(axis: Any, numbers: Sequence[float]) -> None:
    """A logarithmic axis labelled with ordinary numbers."""
    axis.set_major_locator(_locator(numbers))
    axis.set_minor_locator(_locator([]))
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _locator(numbers: Sequence[float]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(list(numbers))
