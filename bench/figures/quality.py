"""Quality: how near the hard top-k, how undecided, against the temperature."""

from __future__ import annotations

from typing import Any

from bench.figures._style import foot, look, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in rows if "tau" in row]
    methods = list(dict.fromkeys(row["what"] for row in rows))
    figure, axes = subplots(1, 2, size=(10, 4))
    panels = {"distance": "distance to the hard top-k", "entropy": "entropy, as a share of the largest"}
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for index, method in enumerate(methods):
            line = sorted((row["tau"], row[key]) for row in rows if row["what"] == method)
            axis.plot(*zip(*line, strict=True), label=method, **look(index))
        axis.set(xscale="log", xlabel="temperature τ", title=title, ylim=(-0.02, 1.05))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle(f"From hard to flat: n = {rows[0]['n']}, k = {rows[0]['k']}, normal scores", x=0.01, ha="left")
    foot(figure, rows)
    return {"quality": figure}
