"""Speed: the ratio to softmax, by shape, and what hard score distributions do to it."""

from __future__ import annotations

from typing import Any

from bench.common import NATIVE, same
from bench.figures._style import BASE, OURS, PEER, foot, look, plain_log, subplots

PLAIN = {"count": "n/16", "dist": "normal", "dtype": "float32", "threads": 1}
SHAPES = ("1x1000000", "1x100000", "16x16384", "256x32768", "64x1024", "4096x64")
LABEL = {"sigmoid()": "torch.sigmoid", "softmax": "torch.softmax", "topk": "torch.topk", "sort": "torch.sort", "copy": "a copy"}


def draw(rows: list[dict[str, Any]]) -> dict[str, Any]:
    timed = [row for row in rows if "ratio" in row]
    best = [row for row in timed if row["what"] in NATIVE and row["kernels"] == "on"]
    short = [row for row in timed if row["kind"] != "method" or row["what"] == "sigmoid" or row in best]
    return {"speed": _by_shape(short), "speed_methods": _by_shape(timed), "speed_distributions": _by_distribution(timed)}


def _name(row: dict[str, Any]) -> str:
    if row["what"] in NATIVE and row["kind"] == "method":
        return f"{row['what']} ({'native' if row['kernels'] == 'on' else 'reference'})"
    return LABEL.get(row["what"], row["what"])


def _by_shape(rows: list[dict[str, Any]]) -> Any:
    """One panel a shape; filled: forward, hollow: forward + backward."""
    plain = [row for row in rows if same(row, **PLAIN)]
    native = any(row["kernels"] == "on" for row in plain)
    plain = [row for row in plain if row["kind"] == "method" or row["kernels"] == ("on" if native else "off")]
    names = sorted({_name(row) for row in plain}, key=lambda name: _order(name, plain))
    figure, axes = subplots(2, 3, size=(11, 1.6 + 0.34 * len(names)), sharey=True, sharex=True)
    for axis, shape in zip(axes.flat, SHAPES, strict=True):
        here = [row for row in plain if row["shape"] == shape]
        for row in here:
            colour = OURS if row["kind"] == "method" else PEER if row["kind"] == "peer" else BASE
            face = colour if row["mode"] == "forward" else "white"
            axis.plot(row["ratio"], names.index(_name(row)), "o", color=colour, markerfacecolor=face, markersize=5.5)
        axis.axvline(1, color=BASE, linewidth=0.8)
        axis.set_xscale("log")
        axis.set_title(shape.replace("x", " × ").replace("1000000", "10⁶").replace("100000", "10⁵"))
        axis.set_yticks(range(len(names)), names)
    plain_log(axes.flat[0].xaxis, [0.1, 1, 10, 100, 1000, 10000])
    for axis in axes[-1]:
        axis.set_xlabel("time, as a multiple of torch.softmax")
    figure.suptitle(
        "Soft top-k against softmax (float32, 1 thread, k = n/16, normal scores): ● forward  ○ forward + backward", x=0.01, ha="left"
    )
    foot(figure, plain)
    return figure


def _order(name: str, rows: list[dict[str, Any]]) -> float:
    """Slowest at the bottom, by the geometric mean."""
    from statistics import geometric_mean

    return -geometric_mean([row["ratio"] for row in rows if _name(row) == name and row["mode"] == "forward"] or [1e9])


def _by_distribution(rows: list[dict[str, Any]]) -> Any:
    """Sigmoid top-k, forward: panels by path, lines by distribution."""
    mine = [row for row in rows if row["what"] == "sigmoid" and same(row, mode="forward", dtype="float32", threads=1, count="n/16")]
    paths = [path for path in ("on", "off") if any(row["kernels"] == path for row in mine)]
    figure, axes = subplots(1, len(paths), size=(4.6 * len(paths), 3.4), squeeze=False, sharey=True)
    for axis, path in zip(axes.flat, paths, strict=True):
        for index, dist in enumerate(("normal", "scale100", "cauchy", "ties")):
            found = {row["shape"]: row["ratio"] for row in mine if same(row, kernels=path, dist=dist)}
            shapes = [shape for shape in SHAPES if shape in found]
            axis.plot([SHAPES.index(s) for s in shapes], [found[s] for s in shapes], "o", label=dist, **{**look(index), "linestyle": ":"})
        axis.axhline(1, color=BASE, linewidth=0.8)
        axis.set_yscale("log")
        axis.set_xticks(range(len(SHAPES)), [s.replace("1000000", "10⁶").replace("100000", "10⁵") for s in SHAPES], rotation=30)
        axis.set_title(f"sigmoid top-k, {'native' if path == 'on' else 'reference'}")
    plain_log(axes.flat[0].yaxis, [0.3, 0.5, 1, 2, 4, 10, 30, 100, 300])
    axes.flat[0].set_ylabel("multiple of torch.softmax, forward")
    axes.flat[-1].legend(title="scores")
    foot(figure, mine)
    return figure
