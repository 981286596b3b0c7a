"""What the threshold family optimises: the potential, its inverse map, and the loss that they make."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from khot._tensors import Number, column, form_for, readable, work_dtype
from khot.checks import check_options, check_scores, check_tau, door
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.rows import LOCAL, Rows
from khot.registry import RELAXATIONS, find_method


def topk_value(scores: Tensor, k: Number, tau: Number = 1.0, *, method: str = "sigmoid", dim: int = -1, **options: Any) -> Tensor:
    r"""The potential of a soft top-k: a smooth sum of the k largest scores.

    .. math:: \Omega^*(x, k) = \max_{y \in [0,1]^n,\ \sum_i y_i = k} x^\top y + \tau \sum_i h(y_i)

    with the binary entropy for ``sigmoid``. Its gradient in the scores is the mask; in ``k`` it is the threshold.

    Args:
        scores: any shape; -inf excludes an item.
        k: how many; may be fractional and may differ per row.
        tau: temperature; the limit 0 is the sum of the k largest.
        method: a threshold method: sigmoid, euclidean, laplace, gaussian, entmax or permutahedron.
        dim: the dimension to select along.
        options: the method's own.

    Returns:
        The scores' shape without ``dim``.

    Example:
        >>> topk_value(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.01)
        tensor(5.)
    """
    return _value(scores, k, tau, dim=dim, family=threshold_family(method, options))


def topk_inverse(mask: Tensor, tau: Number = 1.0, *, method: str = "sigmoid", dim: int = -1, **options: Any) -> Tensor:
    r"""Scores whose soft top-k is ``mask``: :math:`x = \tau F^{-1}(y)`, unique up to a constant; ``logit`` for ``sigmoid``.

    Args:
        mask: entries in [0, 1]; 0 and 1 map to the ends of the family's range (infinite for sigmoid).
        tau: temperature.
        method: a threshold method.
        dim: the dimension that a per-row ``tau`` leaves out.
        options: the method's own.

    Returns:
        Scores like ``mask``.

    Example:
        >>> topk_inverse(torch.tensor([0.5, 0.25]))
        tensor([ 0.0000, -1.0986])
    """
    check_scores(mask, dim, "mask")
    check_tau(tau, mask, dim)
    y = mask.movedim(dim, -1).to(work_dtype(mask))
    return (threshold_family(method, options).inverse(y) * column(tau, y)).to(mask.dtype).movedim(-1, dim)


def topk_loss(
    scores: Tensor,
    target: Tensor,
    tau: Number = 1.0,
    *,
    method: str = "sigmoid",
    dim: int = -1,
    reduction: Literal["mean", "sum", "none"] = "mean",
    **options: Any,
) -> Tensor:
    r"""The k-hot cross entropy: the Fenchel-Young loss of a soft top-k.

    .. math:: L(x, y) = \Omega^*(x, k) - x^\top y - \tau \sum_i h(y_i), \quad k = \textstyle\sum_i y_i

    It is convex in the scores, never negative, zero only where the soft top-k equals the target, and its gradient is
    ``soft_topk(scores, k, tau) - target``.

    Args:
        scores: any shape.
        target: like ``scores``: a mask of bools, 0/1 integers or numbers in [0, 1] that sums to k along ``dim``. Or integer indices: one
            per row (the scores' shape without ``dim``), or several distinct ones along ``dim`` (fewer than there are items).
        tau: temperature.
        method: a threshold method.
        dim: the dimension of the items.
        reduction: over the rows, ``mean``, ``sum`` or ``none``.
        options: the method's own.

    Returns:
        One number; with ``none`` one for each row, the scores' shape without ``dim``.

    Example:
        >>> topk_loss(torch.tensor([9.0, -9.0, 9.0]), torch.tensor([1.0, 0.0, 1.0]))
        tensor(0.0003)
        >>> topk_loss(torch.tensor([9.0, -9.0, 9.0]), torch.tensor([0, 2]))
        tensor(0.0003)
    """
    if type(scores) is not Tensor and (form := form_for("topk_loss", scores)):
        return form(scores, target, tau, method=method, dim=dim, reduction=reduction, **options)
    check_scores(scores, dim)
    check_reduction(reduction)
    family = threshold_family(method, options)
    goal = as_mask(target, scores, dim)
    loss = _loss(scores, goal.sum(-1), tau, dim=dim, goal=goal, family=family)
    return reduce_rows(loss, reduction)


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def reduce_rows(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def threshold_family(method: str, options: dict[str, Any]) -> Family:
    """The family behind a threshold method, or an error that lists those."""
    row = find_method(method)
    if row.family is None:
        choices = ", ".join(sorted(name for name, other in RELAXATIONS.items() if other.family is not None))
        raise ValueError(f"method {method!r} is no threshold family and has no potential; choose from {choices}")
    check_options(method, options, row.options)
    return row.family(**options)


def as_mask(target: Tensor, scores: Tensor, dim: int) -> Tensor:
    """The target as a mask along the last dimension, in float32 or better."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}; wrap it in torch.as_tensor(...)")
    dtype, rows = work_dtype(scores), scores.movedim(dim, -1)
    if target.shape == scores.shape:
        goal = target.movedim(dim, -1).to(dtype)
        if readable(goal) and not bool(((goal >= 0) & (goal <= 1)).all()):
            raise ValueError(f"target must be between 0 and 1, got values from {goal.min().item():g} to {goal.max().item():g}")
        return goal
    whole = not target.is_floating_point() and not target.is_complex() and target.dtype != torch.bool
    at = target.unsqueeze(-1) if target.shape == rows.shape[:-1] else target.movedim(dim, -1) if target.ndim == scores.ndim else target
    if not whole or at.shape[:-1] != rows.shape[:-1] or at.shape[-1] > rows.shape[-1]:
        raise ValueError(
            f"target must have the scores' shape {tuple(scores.shape)}, or hold indices in the shape {tuple(rows.shape[:-1])} "
            f"(one per row) or fewer along dim={dim} (several), got {target.dtype} of shape {tuple(target.shape)}"
        )
    if readable(at) and not bool(((at >= 0) & (at < rows.shape[-1])).all()):
        raise ValueError(f"target indices must be between 0 and n-1={rows.shape[-1] - 1}, got {at.min().item()} to {at.max().item()}")
    if readable(at) and at.shape[-1] > 1 and not bool(at.sort(-1)[0].diff(dim=-1).all()):
        raise ValueError("target indices must differ within a row, got one twice; give each index once, or a mask like the scores")
    return torch.zeros(rows.shape, dtype=dtype, device=scores.device).scatter(-1, at.long(), 1.0)


def _value_of(scores: Tensor, k: Number, tau: Number, *, family: Family) -> Tensor:
    y = solve_mask(scores, k, tau, family)
    return (_product(scores, y) + _entropy(y, family) * column(tau, scores)).sum(-1)


def _entropy(y: Tensor, family: Family) -> Tensor:
    """The entropy without weights so small that they count for nothing: its derivatives there are beyond the dtype."""
    return family.entropy(torch.where(y > torch.finfo(y.dtype).tiny ** 0.5, y, 0.0))


def loss_of_rows(scores: Tensor, k: Number, tau: Number, *, goal: Tensor, family: Family, rows: Rows = LOCAL) -> Tensor:
    """The loss of every row, behind the checks."""
    y = solve_mask(scores, k, tau, family, rows)
    over = column(tau, scores)
    over = rows.shared(over) if isinstance(over, Tensor) else over
    return rows.rough(_product(scores, y - goal) + (_entropy(y, family) - family.entropy(goal)) * over)[0].squeeze(-1)


_value = door(_value_of, name="topk_value", options=None, native_half=False, fractional=True, reduces=True)
_loss = door(loss_of_rows, name="topk_loss", options=None, native_half=False, fractional=True, reduces=True)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """``x * y``, nothing where ``y`` is 0 even if ``x`` is infinite."""
    idle = (y == 0) & ~x.isfinite()
    return torch.where(idle, 0.0, x) * y
