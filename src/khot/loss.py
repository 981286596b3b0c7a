"""What the threshold family optimises: the potential, its inverse map, and the loss that they make."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from khot._tensors import Number, column, readable
from khot.checks import check, check_scores, check_tau, find
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family
from khot.relaxations.entmax import tsallis
from khot.relaxations.euclidean import EUCLIDEAN
from khot.relaxations.gaussian import GAUSSIAN
from khot.relaxations.laplace import LAPLACE
from khot.relaxations.sigmoid import SIGMOID

_FAMILIES = {family.name: family for family in (SIGMOID, EUCLIDEAN, LAPLACE, GAUSSIAN, tsallis(1.5))}


def topk_value(scores: Tensor, k: Number, tau: Number = 1.0, *, method: str = "sigmoid", dim: int = -1) -> Tensor:
    r"""The potential of a soft top-k: a smooth sum of the k largest scores.

    .. math:: \Omega^*(x, k) = \max_{y \in [0,1]^n,\ \sum_i y_i = k} x^\top y + \tau \sum_i h(y_i)

    with the binary entropy for ``sigmoid``. Its gradient in the scores is the mask; in ``k`` it is the threshold.

    Args:
        scores: any shape; -inf excludes an item.
        k: how many; may be fractional and may differ per row.
        tau: temperature; the limit 0 is the sum of the k largest.
        method: a threshold method: sigmoid, euclidean, laplace, gaussian or entmax (at alpha = 1.5).
        dim: the dimension to select along.

    Returns:
        The scores' shape without ``dim``.

    Example:
        >>> topk_value(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.01)
        tensor(5.)
    """
    check(scores, k, tau, dim=dim)
    family: Family = find(_FAMILIES, method, "threshold method")
    x = scores.movedim(dim, -1)
    y = solve_mask(x, k, tau, family)
    return (_product(x, y) + family.entropy(y) * column(tau, x)).sum(-1)


def topk_inverse(mask: Tensor, tau: Number = 1.0, *, method: str = "sigmoid", dim: int = -1) -> Tensor:
    r"""Scores whose soft top-k is ``mask``: :math:`x = \tau F^{-1}(y)`, unique up to a constant; ``logit`` for ``sigmoid``.

    Args:
        mask: entries in [0, 1]; 0 and 1 map to the ends of the family's range (infinite for sigmoid).
        tau: temperature.
        method: a threshold method.
        dim: the dimension that a per-row ``tau`` leaves out.

    Example:
        >>> topk_inverse(torch.tensor([0.5, 0.25]))
        tensor([ 0.0000, -1.0986])
    """
    check_scores(mask, dim, "mask")
    check_tau(tau, mask, dim)
    family: Family = find(_FAMILIES, method, "threshold method")
    y = mask.movedim(dim, -1)
    return (family.inverse(y) * column(tau, y)).movedim(-1, dim)


def topk_loss(
    scores: Tensor,
    target: Tensor,
    tau: Number = 1.0,
    *,
    method: str = "sigmoid",
    dim: int = -1,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    r"""The k-hot cross entropy: the Fenchel-Young loss of a soft top-k.

    .. math:: L(x, y) = \Omega^*(x, k) - x^\top y - \tau \sum_i h(y_i), \quad k = \textstyle\sum_i y_i

    It is convex in the scores, never negative, zero only where the soft top-k equals the target, and its gradient is
    ``soft_topk(scores, k, tau) - target``.

    Args:
        scores: any shape.
        target: like ``scores``, in [0, 1]: a k-hot vector, or one that sums to k along ``dim``.
        tau: temperature.
        method: a threshold method.
        dim: the dimension of the items.
        reduction: over the rows, ``mean``, ``sum`` or ``none``.

    Example:
        >>> topk_loss(torch.tensor([9.0, -9.0, 9.0]), torch.tensor([1.0, 0.0, 1.0]))
        tensor(0.0003)
    """
    check_scores(scores, dim)
    check_scores(target, dim, "target")
    if target.shape != scores.shape:
        raise ValueError(f"target must have the scores' shape {tuple(scores.shape)}, got {tuple(target.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    family: Family = find(_FAMILIES, method, "threshold method")
    x, goal = scores.movedim(dim, -1), target.movedim(dim, -1).to(scores.dtype)
    if readable(goal) and not bool(((goal >= 0) & (goal <= 1)).all()):
        raise ValueError(f"target must be between 0 and 1, got values from {goal.min().item():g} to {goal.max().item():g}")
    k = goal.sum(-1)
    check_tau(tau, x)
    y = solve_mask(x, k, tau, family)
    loss = (_product(x, y - goal) + (family.entropy(y) - family.entropy(goal)) * column(tau, x)).sum(-1)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _product(x: Tensor, y: Tensor) -> Tensor:
    """``x * y``, nothing where ``y`` is 0 even if ``x`` is infinite."""
    idle = (y == 0) & ~x.isfinite()
    return torch.where(idle, 0.0, x) * y
