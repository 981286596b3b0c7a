"""Time per element against n."""

from __future__ import annotations

from typing import Any

from bench.common import same
from bench.figures._style import foot, look, plain_log, subplots

LABEL = {"softmax": "torch.softmax", "sigmoid": "khot.sigmoid_topk", "topk": "torch.topk"}


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    figure, axes = subplots(1, 2, size=(9, 3.4), sharey=True)
    for axis, mode in zip(axes, ("forward", "forward+backward"), strict=True):
        for index, what in enumerate(("sigmoid", "topk", "softmax")):
            line = sorted((row["n"], row["nanoseconds"]) for row in rows if same(row, what=what, mode=mode))
            axis.plot(*zip(*line, strict=True), marker="o", label=LABEL[what], **look(index))
        axis.set(xscale="log", yscale="log", xlabel="n", title=mode.replace("+", " + "))
    plain_log(axes[0].yaxis, [0.3, 1, 3, 10, 30, 100, 300, 1000, 3000])
    axes[0].set_ylabel("nanoseconds per element")
    axes[0].legend()
    path = "native" if rows[-1]["kernels"] == "on" else "reference"
    figure.suptitle(f"Time per element: one row, float32, 1 thread, k = n/16 ({path})", x=0.01, ha="left")
    foot(figure, rows)
    return {"linear": figure}
