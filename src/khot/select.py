"""Soft selection of rows: look up the relaxation, weigh the rows, harden if asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from khot._tensors import Number, form_for
from khot.checks import check, check_options
from khot.hard import Gathered, through
from khot.primitives.select import largest as largest_indices
from khot.registry import Relaxation, find_method


def select_topk(
    x: Tensor,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    method: str = "halving",
    hard: bool = False,
    largest: bool = True,
    **options: Any,
) -> Tensor:
    r"""The ``k`` items of ``x`` with the largest scores, differentiably.

    Args:
        x: ``(..., n, d)``, the items; ``(n, d)``, or any shape that broadcasts, where rows of scores share their items.
        scores: ``(..., n)``, one for each item; -inf excludes an item, e.g. where a sequence is shorter than the batch.
        k: how many items to select.
        tau: temperature, a number or ``(...)``.
        method: a name in :data:`khot.RELAXATIONS`. A matrix method mixes the items for each place; a mask method returns the items
            with the ``k`` largest scores, largest first, each multiplied by its mask entry.
        hard: return the items themselves, with the gradient of the soft selection.
        largest: ``False`` selects the ``k`` smallest, smallest first: the same call on ``-scores``, so that +inf excludes an item.
        options: the method's own.

    Returns:
        ``(..., k, d)``. Places for which no item is left are 0. :func:`select_topk_with_indices` returns the indices too.

    Example:
        >>> x = torch.arange(8.0).reshape(4, 2)
        >>> scores = torch.tensor([0.1, 0.9, 0.5, 0.6])
        >>> select_topk(x, scores, k=2, hard=True)
        tensor([[2., 3.],
                [6., 7.]])
        >>> select_topk(x, scores, k=2, boost=5.0)
        tensor([[1.9640, 2.9640],
                [5.2449, 6.2449]])
    """
    return select_rows(x, scores, k, tau, method, hard, largest, options, indices=False)[0]


def select_topk_with_indices(
    x: Tensor,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    method: str = "halving",
    hard: bool = False,
    largest: bool = True,
    **options: Any,
) -> Gathered:
    """:func:`select_topk` and the indices of the items that the places stand for; the arguments are the same.

    Returns:
        ``values``: what :func:`select_topk` returns; ``indices``: ``(..., k)``, the items with the ``k`` largest scores, largest first.
        Where fewer than ``k`` items take part, the last indices are those of excluded items.

    Example:
        >>> x = torch.arange(8.0).reshape(4, 2)
        >>> scores = torch.tensor([0.1, 0.9, 0.5, 0.6])
        >>> select_topk_with_indices(x, scores, k=2, hard=True).indices
        tensor([1, 3])
    """
    values, index = select_rows(x, scores, k, tau, method, hard, largest, options, indices=True)
    assert index is not None
    return Gathered(values, index)


def select_rows(
    x: Tensor,
    scores: Tensor,
    k: int,
    tau: Number,
    method: str,
    hard: bool,
    largest: bool,
    options: Mapping[str, Any],
    indices: bool,
) -> tuple[Tensor, Tensor | None]:
    """The selected items and, where asked for, their indices."""
    if type(scores) is not Tensor and (form := form_for("select_topk", scores)):
        return form(x, scores, k, tau, method, hard, largest, options, indices)
    row = find_method(method)
    check(scores, k, tau, fractional=False)
    check_options(method, options, row.options)
    x = _shared(x, scores)
    k, scores = int(k), scores if largest else -scores
    # A mask method takes the items by their indices; a matrix method has no use for them.
    by_index = hard or indices or row.select is None and row.matrix is None
    index = largest_indices(scores, k) if by_index else None
    soft = _soft(row, x, scores, k, tau, options, index)
    return through(_hard(x, scores, index), soft) if hard and index is not None else soft, index


def _shared(x: Tensor, scores: Tensor) -> Tensor:
    """The items beside every row of scores, ``(..., n, d)``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}; wrap it in torch.as_tensor(...)")
    if not x.is_floating_point():
        raise TypeError(f"x must be of a floating dtype, got {x.dtype}; convert with x.float()")
    if x.shape[:-1] == scores.shape:
        return x
    rows = x.shape[:-1]
    missing = scores.ndim - len(rows)
    fits = rows and missing >= 0 and rows[-1] == scores.shape[-1]
    if not fits or any(mine not in (1, theirs) for mine, theirs in zip(rows, scores.shape[missing:], strict=True)):
        raise ValueError(
            f"x must have shape ({', '.join(map(str, scores.shape))}, d), one row of features for each score, or one that broadcasts to it,"
            f" got {tuple(x.shape)}; for one feature use x.unsqueeze(-1)"
        )
    return x.expand(*scores.shape, x.shape[-1])


def _soft(row: Relaxation, x: Tensor, scores: Tensor, k: int, tau: Number, options: Mapping[str, Any], index: Tensor | None) -> Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _soft(row, x, scores, k, tau, options, index)
    wide = torch.promote_types(torch.promote_types(x.dtype, scores.dtype), torch.float32)
    items, values = x.to(wide), scores.to(wide)
    if row.select is not None:
        out = row.select(items, values, k, tau, **options)
    elif row.matrix is not None:
        out = row.matrix(values, k, tau, **options) @ items
    else:
        assert index is not None
        kept = row.topk(values, k, tau, **options).gather(-1, index)
        out = _take(items, index) * kept.unsqueeze(-1)
    return out.to(x.dtype)


def _hard(x: Tensor, scores: Tensor, index: Tensor) -> Tensor:
    there = scores.detach().gather(-1, index) > -torch.inf
    rows = torch.where(there.unsqueeze(-1), _take(x, index), 0.0)
    return rows.masked_fill(scores.detach().isnan().any(-1)[..., None, None], torch.nan)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
