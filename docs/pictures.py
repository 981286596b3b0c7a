"""Pictures of concepts, one per method and one per design, computed by khot when the site is built."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import khot
from bench.figures import _choice
from bench.figures._style import COLOURS, style, subplots

SCORES = torch.tensor([1.2, -0.4, 2.1, 0.3, 1.7, -1.1, 0.8, 1.0], dtype=torch.float64)
PROBS = torch.tensor([0.9, 0.7, 0.5, 0.4, 0.3, 0.2], dtype=torch.float64)
DRAWS = 4000


def every() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and drawing of every picture."""
    yield from {"temperature": temperature, "shapes": shapes, "straight_through": straight, "fractional": fractional}.items()
    yield "choosing", _choice.draw
    for name in sorted(khot.RELAXATIONS):
        yield f"method_{name}", lambda name=name: method(name)
    for name in sorted(khot.DESIGNS):
        yield f"design_{name}", lambda name=name: design(name)


def svg(draw: Callable[[], Any]) -> str:
    """The picture as text, the same for the same numbers."""
    out = io.StringIO()
    with style():
        figure = draw()
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        figure.clear()
    return out.getvalue()


def temperature() -> Any:
    figure, axes = subplots(1, 4, size=(9, 2.1), sharey=True)
    for axis, tau in zip(axes, (0.05, 0.3, 1.0, 5.0), strict=True):
        _bars(axis, khot.soft_topk(SCORES, 3, tau))
        axis.set_title(f"τ = {tau:g}")
    return figure


def shapes() -> Any:
    """Mask, matrix and samples of the same scores."""
    figure, axes = subplots(1, 4, size=(9, 2.3))
    axes[0].bar(range(8), SCORES, color="#9A9A9A", width=0.7)
    axes[0].set_xticks(range(8))
    _bars(axes[1], khot.soft_topk(SCORES, 3, 0.3))
    _map(axes[2], khot.soft_topk_matrix(SCORES, 3, 0.3, method="softsort"), "Blues")
    samples = khot.sample_topk(SCORES, 3, 0.3, num_samples=8, generator=torch.Generator().manual_seed(1))
    _map(axes[3], samples, "Blues")
    for axis, title in zip(axes, ("scores", "mask: sums to k", "matrix: row per place", "samples: exactly k"), strict=True):
        axis.set_title(title)
    return figure


def straight() -> Any:
    """What goes forward and what goes backward, as one score moves past the others."""
    figure, axes = subplots(1, 2, size=(8, 2.4), sharex=True)
    moved = torch.linspace(-2, 3, 301, dtype=torch.float64)
    rows = SCORES.expand(301, 8).clone()
    rows[:, 3] = moved
    for axis, part in zip(axes, ("value of mask[3]", "gradient in score 3"), strict=True):
        for index, (label, call) in enumerate(_calls().items()):
            x = rows.clone().requires_grad_()
            y = call(x)[:, 3]
            line = y if part.startswith("value") else torch.autograd.grad(y.sum(), x)[0][:, 3] if y.requires_grad else torch.zeros(301)
            axis.plot(moved, line.detach(), label=label, color=COLOURS[index], linestyle=("-", "--", ":")[index], linewidth=2)
        axis.set(title=part, xlabel="score 3")
    axes[0].legend()
    return figure


def _calls() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "topk_mask": lambda x: khot.topk_mask(x, 3),
        "soft_topk": lambda x: khot.soft_topk(x, 3, 0.3),
        "hard=True": lambda x: khot.soft_topk(x, 3, 0.3, hard=True),
    }


def fractional() -> Any:
    figure, axis = subplots(size=(6, 2.6))
    k = torch.linspace(0, 8, 161, dtype=torch.float64)
    masks = khot.soft_topk(SCORES.expand(161, 8), k, 0.3)
    order = SCORES.argsort(descending=True)
    axis.stackplot(k, masks[:, order].mT, colors=[*COLOURS[:8]], alpha=0.85)
    axis.set(xlabel="k", ylabel="mask, stacked", title="every k from 0 to n: the weights add up to k")
    return figure


def method(name: str) -> Any:
    """Value and gradient for two items and k = 1: scores (x, 0)."""
    figure, axes = subplots(1, 2, size=(7.4, 2.3), sharex=True)
    x = torch.linspace(-4, 4, 401, dtype=torch.float64)
    for index, tau in enumerate((0.3, 1.0)):
        pairs = torch.stack((x, torch.zeros_like(x)), -1).requires_grad_()
        options = {"generator": torch.Generator().manual_seed(0)} if "generator" in khot.RELAXATIONS[name].options else {}
        value = khot.soft_topk(pairs, 1, tau, method=name, **options)[:, 0]
        slope = torch.autograd.grad(value.sum(), pairs)[0][:, 0]
        for axis, line in zip(axes, (value, slope), strict=True):
            axis.plot(x, line.detach(), color=COLOURS[index], label=f"τ = {tau:g}")
    axes[0].set(title="mask[0] for scores (x, 0), k = 1", xlabel="x", ylim=(-0.05, 1.05))
    axes[1].set(title="its gradient in x", xlabel="x")
    axes[0].legend()
    return figure


def design(name: str) -> Any:
    """Frequencies beside the probabilities, and how often two items come together."""
    figure, axes = subplots(1, 2, size=(7.4, 2.5), width_ratios=(1.5, 1))
    masks = khot.sample(PROBS, design=name, num_samples=DRAWS, generator=torch.Generator().manual_seed(0))
    axes[0].bar(range(6), PROBS, color="#C9D2F2", width=0.7, label="π asked for")
    error = 2 * (PROBS * (1 - PROBS) / DRAWS).sqrt()
    axes[0].errorbar(range(6), masks.mean(0), yerr=error, fmt="o", color=COLOURS[1], label=f"frequency in {DRAWS} draws")
    axes[0].set(title="each item", ylim=(0, 1.05))
    axes[0].legend()
    joint = masks.mT @ masks / DRAWS
    _map(axes[1], joint, "Blues")
    axes[1].set_title("two items together")
    return figure


def _bars(axis: Any, mask: Tensor) -> None:
    axis.bar(range(len(mask)), mask.detach(), color=COLOURS[0], width=0.7)
    axis.set_ylim(0, 1.03)
    axis.set_xticks(range(len(mask)))
    axis.grid(visible=False, axis="x")


def _map(axis: Any, matrix: Tensor, colours: str) -> None:
    axis.imshow(matrix.detach().numpy(), cmap=colours, aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    axis.grid(visible=False)
    axis.set_xticks(range(matrix.shape[1]))
    axis.set_yticks(range(matrix.shape[0]))
