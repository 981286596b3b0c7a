"""Gradient estimators: bias and spread, each problem a dot."""

from __future__ import annotations

from typing import Any

from bench.common import same
from bench.figures._style import foot, look, subplots


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(row["objective"] for row in rows))
    names = list(dict.fromkeys(row["what"] for row in rows))
    figure, axes = subplots(1, len(kinds), size=(4 * len(kinds) + 2, 3.8), sharey=True, squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        for index, name in enumerate(names):
            here = [row for row in rows if same(row, what=name, objective=kind)]
            colour = look(index)["color"]
            axis.plot([row["spread"] for row in here], [max(row["bias"], 1e-4) for row in here], "o", color=colour, label=name, alpha=0.8)
        noise = [row["bias_error"] for row in rows if row["objective"] == kind and row["bias_error"] > 0]
        axis.axhspan(1e-4, max(noise, default=1e-4), color="#EEEEEE", zorder=0)  # what this many estimates cannot tell from 0
        axis.set(xscale="symlog", yscale="log", xlabel="spread of one estimate", title=f"{kind} objective", xlim=(0, None))
        axis.set_xscale("symlog", linthresh=0.1)
    axes[0][0].set_ylabel("bias")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    first = rows[0]
    title = (
        f"Relative to the exact gradient, n = {first['n']}, k = {first['k']}, {first['samples']} masks an estimate; grey: below the noise"
    )
    figure.suptitle(title, x=0.01, ha="left")
    foot(figure, rows)
    return {"estimators": figure}
