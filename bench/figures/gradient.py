"""Gradients: agreement with the smoothed objective, and which methods learn the right subset."""

from __future__ import annotations

from typing import Any

from bench.common import same
from bench.figures._style import BASE, OURS, families, foot, look, plain_log, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"gradient_agreement": _agreement(rows), "gradient_toy": _toy(rows)}


def _agreement(rows: list[dict[str, Any]]) -> Any:
    mine = [row for row in rows if same(row, test="agreement", hard=False)]
    groups = families(list(dict.fromkeys(row["what"] for row in mine)))
    figure, axes = subplots(2, 3, size=(12, 6.4), sharex=True)
    panels = {"cosine": "cosine with the smoothed objective's gradient", "norm": "norm of the gradient", "zeros": "share of zero entries"}
    for line, (group, methods) in zip(axes, groups.items(), strict=True):
        for axis, (key, title) in zip(line, panels.items(), strict=True):
            _lines(axis, [row for row in mine if row["what"] in methods], key)
            axis.set(xscale="log", title=title if key != "norm" else f"{title} ({group})")
        line[0].set_ylim(-0.1, 1)
        line[1].set_yscale("log")
        line[2].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    for axis in axes[1]:
        axis.set_xlabel("temperature τ")
    foot(figure, mine)
    return figure


def _lines(axis: Any, rows: list[dict[str, Any]], key: str) -> None:
    floor = 1e-6 if key == "norm" else -1.0  # a gradient of 0 lies at the foot of a logarithmic axis
    for index, method in enumerate(dict.fromkeys(row["what"] for row in rows)):
        line = sorted((row["tau"], max(floor, row[key])) for row in rows if row["what"] == method)
        axis.plot(*zip(*line, strict=True), marker="o", label=method, **look(index))


def _toy(rows: list[dict[str, Any]]) -> Any:
    """The best temperature of each method; filled: soft, hollow: straight-through."""
    mine = [row for row in rows if same(row, test="toy")]
    best = {(row["what"], row["hard"]): row for row in sorted(mine, key=lambda row: (row["solved"], -(row["median_steps"] or 1e9)))}
    names = sorted({what for what, _ in best}, key=lambda what: (best[what, False]["solved"], -(best[what, False]["median_steps"] or 1e9)))
    figure, axes = subplots(1, 2, size=(9, 1.2 + 0.23 * len(names)), sharey=True)
    for (what, hard), row in best.items():
        face = "white" if hard else OURS
        axes[0].plot(row["solved"], names.index(what), "o", color=OURS, markerfacecolor=face)
        if row["median_steps"]:
            axes[1].plot(row["median_steps"], names.index(what), "o", color=OURS, markerfacecolor=face)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(title="problems solved", xlim=(-0.03, 1.03))
    axes[1].set(title="steps until right for good (median)", xscale="log")
    plain_log(axes[1].xaxis, [1, 2, 5, 10, 20, 50, 100, 200, 500])
    axes[0].axvline(1, color=BASE, linewidth=0.8)
    first = mine[0]
    title = f"Learning the right {first['k']} of {first['n']} by gradient: ● soft  ○ straight-through, each at its best temperature"
    figure.suptitle(title, x=0.01, ha="left")
    foot(figure, mine)
    return figure
