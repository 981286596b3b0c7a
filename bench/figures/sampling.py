"""Sampling designs: time and memory against n."""

from __future__ import annotations

from typing import Any

from bench.common import same
from bench.figures._style import BASE, foot, look, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    timed = [row for row in rows if "test" not in row and "seconds" in row]
    used = [row for row in rows if same(row, test="memory")]
    figure, axes = subplots(1, 2, size=(11, 4))
    for index, name in enumerate(dict.fromkeys(row["what"] for row in timed)):
        given = {"color": BASE, "linestyle": "--" if name == "sort" else ":"} if name in ("sort", "rand + cumsum") else look(index)
        times = sorted((row["n"], 1e3 * row["seconds"]) for row in timed if row["what"] == name)
        axes[0].plot(*zip(*times, strict=True), marker="o", label=name, **given)
        if memory := sorted((row["n"], row["memory"] / row["input"]) for row in used if row["what"] == name):
            axes[1].plot(*zip(*memory, strict=True), marker="o", **given)
    axes[0].set(xscale="log", yscale="log", xlabel="n", title="milliseconds a draw")
    axes[1].set(xscale="log", yscale="log", xlabel="n", title="memory beyond input and output, multiples of the input")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle("Exact-k samples: one row, float32, 1 thread, k = n/16", x=0.01, ha="left")
    foot(figure, timed)
    return {"sampling": figure}
