"""Memory: what is needed beyond input and output, and what is kept for backward."""

from __future__ import annotations

from typing import Any

from bench.common import NATIVE, same
from bench.figures._style import BASE, OURS, foot, subplots

PANELS = {
    "forward_peak_ratio": "forward: beyond input and output",
    "backward_peak_ratio": "and backward: beyond input and gradient",
    "saved_ratio": "kept for backward",
}


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if "saved" in row]
    shape = max({row["shape"] for row in measured}, key=lambda s: (sum(same(row, shape=s) for row in measured), s))
    native = any(row["kernels"] == "on" for row in measured)
    here = [row for row in measured if row["shape"] == shape and (row["kernels"] == "on" or row["what"] in NATIVE or not native)]
    here.sort(key=lambda row: -row["forward_peak_ratio"])
    figure, axes = subplots(1, 3, size=(11, 1.2 + 0.24 * len(here)), sharey=True)
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        colours = [OURS if row["what"] not in ("softmax", "topk", "sort") else BASE for row in here]
        axis.barh(range(len(here)), [row[key] for row in here], color=colours, height=0.65)
        axis.set_title(title)
        axis.set_xlabel("multiple of the input's size")
        axis.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(here)), [_name(row) for row in here])
    figure.suptitle(f"Peak memory at {shape.replace('x', ' × ')}, float32, k = n/16", x=0.01, ha="left")
    foot(figure, here)
    return {"memory": figure}


def _name(row: dict[str, Any]) -> str:
    if row["what"] in NATIVE:
        return f"{row['what']} ({'native' if row['kernels'] == 'on' else 'reference'})"
    return f"torch.{row['what']}" if row["what"] in ("softmax", "topk", "sort") else row["what"]
