"""The published experiment of successive halving: Figure 1, time against n; Figure 2, nCCS against n."""

from __future__ import annotations

from typing import Any

from bench import published
from bench.common import same
from bench.figures._style import foot, look, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    done = [row for row in rows if "nccs" in row]
    return {"seeds_time": _time(done), "seeds_nccs": _nccs(done), "seeds_methods": _methods(done)}


def _shade(k: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](1 - (k.bit_length() - 2) / 10.5)


def _lines(axis: Any, rows: list[dict[str, Any]], key: str) -> None:
    """A line for each k, dark for large k."""
    for k in sorted({row["k"] for row in rows}):
        line = sorted((row["n"], row[key]) for row in rows if row["k"] == k)
        axis.plot(*zip(*line, strict=True), marker="o", markersize=3.5, color=_shade(k), label=f"{k}")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("n")


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", title="k")


def _time(rows: list[dict[str, Any]]) -> Any:
    """Figure 1."""
    figure, axes = subplots(1, 2, size=(9.5, 3.8), sharey=True)
    for axis, method in zip(axes, ("halving", "iterative"), strict=True):
        mine = [row for row in rows if same(row, what=method, setting="published")]
        _lines(axis, mine, "seconds")
        axis.set(yscale="log", title=method)
    axes[0].set_ylabel("seconds a batch of 16, d = 32")
    _legend(figure, axes[0])
    threads = rows[-1]["threads"]
    figure.suptitle(f"Figure 1. Time against n, by k (CPU, {threads} thread{'s' * (threads > 1)}); lower is better", x=0.01, ha="left")
    foot(figure, rows)
    return figure


def _nccs(rows: list[dict[str, Any]]) -> Any:
    """Figure 2, with the published values as crosses; below, each at its best setting."""
    figure, axes = subplots(2, 2, size=(9.5, 6.6), sharey=True, sharex=True)
    for line, setting in zip(axes, ("published", "best"), strict=True):
        for axis, method in zip(line, ("halving", "iterative"), strict=True):
            _lines(axis, [row for row in rows if same(row, what=method, setting=setting)], "nccs")
            axis.set(title=f"{method}, {setting} setting", ylim=(-0.02, 1.03))
            if setting == "published":
                for (n, _), value in published.NCCS[method].items():
                    axis.plot(n, value, "x", color="#D55E00", markersize=6, markeredgewidth=1.2, zorder=5)
        line[0].set_ylabel("nCCS")
        line[1].set_xlabel("n")
    _legend(figure, axes[0][0])
    figure.suptitle("Figure 2. Quality against n, by k (crosses: as published); higher is better", x=0.01, ha="left")
    foot(figure, rows)
    return figure


def _methods(rows: list[dict[str, Any]], k: int = 8) -> Any:
    """Every matrix method at its best setting, for one k."""
    best = [row for row in rows if same(row, setting="best", k=k)]
    figure, axes = subplots(1, 2, size=(10, 4))
    for axis, key in zip(axes, ("seconds", "nccs"), strict=True):
        for index, method in enumerate(dict.fromkeys(row["what"] for row in best)):
            line = sorted((row["n"], row[key]) for row in best if row["what"] == method)
            axis.plot(*zip(*line, strict=True), marker="o", label=method, **look(index))
        axis.set_xscale("log", base=2)
        axis.set_xlabel("n")
    axes[0].set(yscale="log", title="seconds a batch of 16, d = 32")
    axes[1].set(title="nCCS")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle(f"Every ordered relaxation, k = {k}, the sharpest setting that still has a gradient", x=0.01, ha="left")
    foot(figure, best)
    return figure
