"""Sampling designs: time and memory against n."""

from __future__ import annotations

from typing import Any

from bench.figures._style import BASE, foot, look, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [row for row in rows if "test" not in row and "seconds" in row]
    figure, axes = subplots(1, 2, size=(11, 4))
    names = list(dict.fromkeys(row["what"] for row in mine))
    for index, name in enumerate(names):
        line = sorted((row["n"], row) for row in mine if row["what"] == name)
        given = {"color": BASE, "linestyle": "--" if name == "sort" else ":"} if name in ("sort", "rand + cumsum") else look(index)
        axes[0].plot([n for n, _ in line], [1e3 * row["seconds"] for _, row in line], marker="o", label=name, **given)
        seen = [(n, row["memory"] / row["input"]) for n, row in line if row.get("memory") and n >= 10**4]
        if seen:
            axes[1].plot(*zip(*seen, strict=True), marker="o", **given)
    axes[0].set(xscale="log", yscale="log", xlabel="n", title="milliseconds a draw")
    axes[1].set(xscale="log", yscale="log", xlabel="n", title="memory beyond input and output, multiples of the input")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle("Exact-k samples: one row, float32, 1 thread, k = n/16", x=0.01, ha="left")
    foot(figure, mine)
    return {"sampling": figure}
