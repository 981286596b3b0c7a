"""Euclidean projection onto the k-capped simplex."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._tensors import Number
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, Quick, known
from khot.primitives.threshold.ordinary import ordinary
from khot.registry import relaxation


def _clamp(u: Tensor, out: Tensor) -> Tensor:
    return torch.clamp(u, 0, 1, out=out)


def _sums(u: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    total = _clamp(u, free).sum(-1, keepdim=True)
    return total, torch.eq(u, free, out=free).sum(-1, keepdim=True)


EUCLIDEAN = known(
    Family(
        name="euclidean",
        kernel="euclidean",
        f=lambda u: u.clamp(0, 1),  # not centred: near 0, where small weights live, u keeps its relative precision
        inverse=lambda y: y,
        slope=lambda y: (y * (1 - y)).sign(),  # 1 inside, 0 at both ends; comparisons and a cast cost four times as much
        entropy=lambda y: y * (1 - y) / 2,
        smooth=False,
        quick=Quick(_clamp, lambda u, y, out: torch.eq(u, y, out=out), _sums),
    )
)


@relaxation(
    "euclidean",
    kind="mask",
    cost="O(n)",
    paper="Wang & Lu 2015; Malaviya et al. 2018",
    grad_k=True,
    smooth=False,
    sparse=True,
    native_half=True,
    family=lambda: EUCLIDEAN,
    ordinary=ordinary(EUCLIDEAN),
)
def euclidean_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1) -> Tensor:
    r"""Euclidean top-k: the nearest point of the k-capped simplex, with exact zeros and ones.

    .. math:: y = \arg\min_{y \in [0,1]^n,\ \sum_i y_i = k} \tfrac12 \lVert y - x / \tau \rVert^2

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature; below the gap between the k-th and the next score the result is the hard top-k.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> euclidean_topk(torch.tensor([3.0, 1.0, 2.5, 2.0]), k=2)
        tensor([1.0000, 0.0000, 0.7500, 0.2500])
    """
    return solve_mask(scores, k, tau, EUCLIDEAN)
