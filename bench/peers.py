"""Other people's soft top-k, where it is installed, and the loops one finds in the wild, written out.

Each peer is ``(scores, k) -> mask`` along the last dimension, differentiable in the scores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Peer = Callable[[Tensor, int], Tensor]

# name -> (package that must import, how to get it)
NEEDS = {
    "entmax.budget_bisect": ("entmax", "pip install entmax"),
    "difftopk.softsort": ("difftopk", "pip install --no-deps difftopk diffsort"),
    "jaxopt.box_section": ("jaxopt", "pip install jax jaxopt"),
}


def peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can run here, and for every other the reason why it cannot."""
    found: dict[str, Peer] = {"bisection loop": bisection_topk, "LML loop": lml_topk}
    missing: dict[str, str] = {}
    for name, (package, command) in NEEDS.items():
        if importlib.util.find_spec(package) is None:
            missing[name] = f"{package} is not installed ({command})"
        else:
            found[name] = _BUILD[name]
    return found, missing


def entmax_budget(scores: Tensor, k: int) -> Tensor:
    """entmax 1.3: Euclidean projection onto the capped simplex by bisection."""
    from entmax import budget_bisect

    return budget_bisect(scores, budget=k, dim=-1)


def difftopk_softsort(scores: Tensor, k: int) -> Tensor:
    """difftopk 0.2: the sum of the first k rows of SoftSort's matrix."""
    from difftopk import SoftSort

    return SoftSort(tau=1.0)(scores)[..., :k, :].sum(-2)


def jaxopt_box(scores: Tensor, k: int) -> Tensor:
    """jaxopt: projection onto the box section, through DLPack; forward only."""
    import jax

    return torch.from_dlpack(_jitted()(jax.dlpack.from_dlpack(scores.detach().contiguous()), float(k)))


def _jitted() -> Any:
    import jax
    import jax.numpy as jnp
    from jaxopt.projection import projection_box_section

    def one(x: Any, k: Any) -> Any:
        return projection_box_section(x, (jnp.zeros_like(x), jnp.ones_like(x), jnp.ones_like(x), k))

    if not hasattr(_jitted, "made"):
        _jitted.made = jax.jit(jax.vmap(one, in_axes=(0, None)))  # type: ignore[attr-defined]
    return _jitted.made  # type: ignore[attr-defined]


class _Implicit(torch.autograd.Function):
    """The implicit gradient that goes with any solver of the sigmoid's threshold."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int, solve: Callable[[Tensor, int], Tensor]) -> Tensor:
        y = torch.sigmoid(scores + solve(scores, k))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        v = y * (1 - y)
        return v * (grads[0] - (v * grads[0]).sum(-1, keepdim=True) / v.sum(-1, keepdim=True)), None, None


def bisection_topk(scores: Tensor, k: int, steps: int = 64) -> Tensor:
    """Sigmoid top-k by 64 bisections, the way it is passed around."""

    def solve(x: Tensor, k: int) -> Tensor:
        low, high = -x.amax(-1, keepdim=True) - 10, -x.amin(-1, keepdim=True) + 10
        for _ in range(steps):
            middle = (low + high) / 2
            more = torch.sigmoid(x + middle).sum(-1, keepdim=True) < k
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        return (low + high) / 2

    return _Implicit.apply(scores, k, solve)


def lml_topk(scores: Tensor, k: int, branch: int = 10, steps: int = 10) -> Tensor:
    """The mathematics of the LML layer (Amos et al. 2019), written anew: the bracket is cut in ``branch`` parts at every step."""

    def solve(x: Tensor, k: int) -> Tensor:
        top = x.sort(-1, descending=True).values
        low, high = -top[..., k - 1 : k] - 7, -top[..., min(k, x.shape[-1] - 1)].unsqueeze(-1) + 7
        grid = torch.linspace(0, 1, branch, dtype=x.dtype)
        for _ in range(steps):
            points = low + (high - low) * grid  # (..., branch)
            sums = torch.stack([torch.sigmoid(x + point.unsqueeze(-1)).sum(-1) for point in points.unbind(-1)], -1)
            at = (sums < k).sum(-1, keepdim=True).clamp(1, branch - 1)
            low, high = points.gather(-1, at - 1), points.gather(-1, at)
        return (low + high) / 2

    return _Implicit.apply(scores, k, solve)


_BUILD: dict[str, Peer] = {
    "entmax.budget_bisect": entmax_budget,
    "difftopk.softsort": difftopk_softsort,
    "jaxopt.box_section": jaxopt_box,
}
