"""The picture of the demo: the pixels that were learned, what is seen through them, and accuracy against k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from khot.demo.data import NUM_CLASSES, SIDE, Split
from khot.demo.training import METHODS, Result

COLORS = {"learned": "#d1495b", "hard": "#8d96a3", "information": "#00798c", "variance": "#edae49", "random": "#b9b4c7"}
MARKS = {"learned": "o", "hard": "v", "information": "s", "variance": "D", "random": "x"}
INK, PALE = "#22223b", "#f4f4f6"


def draw(result: Result, split: Split, ks: Sequence[int], labels: Mapping[str, str], out: Path) -> None:
    """Save the picture to ``out``, without a display."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.edgecolor": "#9a9aa8",
    }
    with rc_context(style):
        figure = Figure(figsize=(12, 4.3), dpi=150, facecolor="white")
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.05, 1])[0]
        _pixels(left, result.pixels[:, METHODS.index("learned")], split, ks)
        _curves(right, result.accuracy, ks, labels)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)


def _pixels(figure: Any, masks: Tensor, split: Split, ks: Sequence[int]) -> None:
    """Above, how often each pixel was chosen, for three of the ks; below, digits as the network sees them, for the middle one."""
    shown = _three(ks)
    middle = shown[len(shown) // 2]
    figure.suptitle("Which pixels to look at, learned by gradient", x=0.05, y=0.965, ha="left", fontsize=13, fontweight="bold")
    _note(figure, 0.872, "share of the seeds that chose each of the 8 × 8 pixels")
    for axis, k in zip(_row(figure, len(shown), bottom=0.365, top=0.8), shown, strict=True):
        _image(axis, masks[:, ks.index(k)].mean(0), cmap=_reds())
        axis.set_title(f"k = {k}", fontsize=11, pad=5)
    _note(figure, 0.272, f"what the network sees at k = {middle} (pale: what it does not)")
    for digit, axis in enumerate(_row(figure, NUM_CLASSES, bottom=0.09, top=0.25)):
        _seen(axis, split.train.images[0][split.train.labels[0] == digit][0], masks[0, ks.index(middle)])


def _row(figure: Any, count: int, *, bottom: float, top: float) -> list[Any]:
    place = {"left": 0.05, "right": 0.95, "top": top, "bottom": bottom, "wspace": 0.1}
    return figure.subplots(1, count, squeeze=False, gridspec_kw=place)[0].tolist()


def _note(figure: Any, y: float, text: str) -> None:
    figure.text(0.05, y, text, fontsize=9.5, color="#6b6b7b")


def _three(ks: Sequence[int]) -> list[int]:
    """A small, a middle and a large k of those that there are."""
    ordered = sorted(ks)
    return sorted({ordered[int(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8)})


def _seen(axis: Any, image: Tensor, mask: Tensor) -> None:
    """The whole digit pale, the chosen pixels in full ink and framed."""
    _image(axis, image * (0.3 + 0.7 * mask), cmap="Greys")
    for index in mask.nonzero().flatten().tolist():
        y, x = divmod(index, SIDE)
        axis.add_patch(_frame(x, y))


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=COLORS["learned"], linewidth=0.9)


def _image(axis: Any, values: Tensor, *, cmap: Any) -> None:
    edges = (torch.arange(SIDE + 1, dtype=torch.float32, device="cpu") - 0.5).numpy()
    axis.pcolormesh(edges, edges, values.view(SIDE, SIDE).numpy(), cmap=cmap, vmin=0.0, vmax=1.0, edgecolors="white", linewidth=0.4)
    axis.invert_yaxis()
    axis.set_aspect("equal")
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_color("#d9d9e0")


def _reds() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("khot", [PALE, "#f2b5a7", COLORS["learned"], "#7d1d3f"])


def _curves(figure: Any, accuracy: Tensor, ks: Sequence[int], labels: Mapping[str, str]) -> None:
    """Mean accuracy against k with a band of one standard deviation, named at the line's own colour."""
    figure.suptitle("Test accuracy with k of 64 pixels", x=0.1, y=0.965, ha="left", fontsize=13, fontweight="bold")
    axis = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.97, "top": 0.87, "bottom": 0.13})
    order = sorted(range(len(ks)), key=lambda j: ks[j])
    x = [ks[j] for j in order]
    mean = 100 * accuracy.mean(0)[:, order].numpy()
    spread = 100 * accuracy.std(0, correction=min(1, len(accuracy) - 1))[:, order].numpy()
    for i, method in reversed(list(enumerate(METHODS))):
        bold = method == "learned"
        axis.fill_between(x, mean[i] - spread[i], mean[i] + spread[i], color=COLORS[method], alpha=0.22 if bold else 0.12, linewidth=0)
        style: dict[Any, Any] = {
            "color": COLORS[method],
            "marker": MARKS[method],
            "markersize": 5.5 if bold else 4.5,
            "linewidth": 2.6 if bold else 1.5,
        }
        axis.plot(x, mean[i], label=labels[method], zorder=5 if bold else 3, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, [str(k) for k in x])
    axis.minorticks_off()
    axis.set(xlabel="k, the number of pixels looked at", ylabel="accuracy (%)")
    axis.grid(axis="y", color="#ececf1")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    handles, names = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], names[::-1], frameon=False, loc="lower right")
