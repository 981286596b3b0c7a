"""Quality: how near the hard top-k, how undecided, against the temperature."""

from __future__ import annotations

from typing import Any

from bench.figures._style import families, foot, look, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in rows if "tau" in row]
    groups = families(list(dict.fromkeys(row["what"] for row in rows)))
    figure, axes = subplots(2, 2, size=(9, 6.4), sharex=True)
    panels = {"distance": "distance to the hard top-k", "entropy": "entropy, as a share of the largest"}
    for line, (group, methods) in zip(axes, groups.items(), strict=True):
        for axis, (key, title) in zip(line, panels.items(), strict=True):
            _lines(axis, [row for row in rows if row["what"] in methods], key)
            axis.set(xscale="log", title=f"{title} ({group})", ylim=(-0.02, 1.05))
        line[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    for axis in axes[1]:
        axis.set_xlabel("temperature τ")
    figure.suptitle(f"From hard to flat: n = {rows[0]['n']}, k = {rows[0]['k']}, normal scores", x=0.01, ha="left")
    foot(figure, rows)
    return {"quality": figure}


def _lines(axis: Any, rows: list[dict[str, Any]], key: str) -> None:
    for index, method in enumerate(dict.fromkeys(row["what"] for row in rows)):
        line = sorted((row["tau"], row[key]) for row in rows if row["what"] == method)
        axis.plot(*zip(*line, strict=True), label=method, **look(index))
