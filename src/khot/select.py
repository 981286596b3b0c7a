"""Soft selection of rows: look up the relaxation, weigh the rows, harden if asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from khot._tensors import Number
from khot.checks import check, check_options
from khot.hard import straight_through
from khot.registry import Relaxation, find_method


def select_topk(
    x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, method: str = "halving", hard: bool = False, **options: Any
) -> Tensor:
    r"""The ``k`` items of ``x`` with the largest scores, differentiably.

    Args:
        x: ``(..., n, d)``, the items.
        scores: ``(..., n)``, one for each item; -inf excludes an item, e.g. where a sequence is shorter than the batch.
        k: how many items to select.
        tau: temperature, a number or ``(...)``.
        method: a name in :data:`khot.RELAXATIONS`. A matrix method mixes the items for each place; a mask method returns the items
            with the ``k`` largest scores, largest first, each multiplied by its mask entry.
        hard: return the items themselves, with the gradient of the soft selection.
        options: the method's own.

    Returns:
        ``(..., k, d)``. Places for which no item is left are 0.

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
    row = find_method(method)
    check(scores, k, tau, fractional=False)
    check_options(method, options, row.options)
    _check_items(x, scores)
    k = int(k)
    soft = _soft(row, x, scores, k, tau, options)
    return straight_through(_hard(x, scores, k), soft) if hard else soft


def _check_items(x: Tensor, scores: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}; wrap it in torch.as_tensor(...)")
    if not x.is_floating_point():
        raise TypeError(f"x must be of a floating dtype, got {x.dtype}; convert with x.float()")
    if x.ndim < 2 or x.shape[:-1] != scores.shape:
        raise ValueError(
            f"x must have shape {(*scores.shape, 'd')}, one row of features for each score, got {tuple(x.shape)};"
            " for one feature use x.unsqueeze(-1)"
        )


def _soft(row: Relaxation, x: Tensor, scores: Tensor, k: int, tau: Number, options: Mapping[str, Any]) -> Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _soft(row, x, scores, k, tau, options)
    wide = torch.promote_types(torch.promote_types(x.dtype, scores.dtype), torch.float32)
    items, values = x.to(wide), scores.to(wide)
    if row.select is not None:
        out = row.select(items, values, k, tau, **options)
    elif row.matrix is not None:
        out = row.matrix(values, k, tau, **options) @ items
    else:
        index = _largest(values, k)
        kept = row.topk(values, k, tau, **options).gather(-1, index)
        out = _take(items, index) * kept.unsqueeze(-1)
    return out.to(x.dtype)


def _hard(x: Tensor, scores: Tensor, k: int) -> Tensor:
    index = _largest(scores, k)
    there = scores.detach().gather(-1, index) > -torch.inf
    rows = torch.where(there.unsqueeze(-1), _take(x, index), 0.0)
    return rows.masked_fill(scores.isnan().any(-1)[..., None, None], torch.nan)


def _largest(scores: Tensor, k: int) -> Tensor:
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
