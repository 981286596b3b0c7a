"""NeuralSort."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._settle import Among
from khot._tensors import Number, column, deeper, in_forward_mode, in_reach, wide_dtype
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order
from khot.primitives.pieces import mask_by_rows, select_by_rows
from khot.primitives.slopes import over
from khot.registry import relaxation

_CACHE = 1 << 17  # logits that are worked on at once


def _rows(scores: Tensor, k: int, tau: Number, among: Among | None) -> Callable[[int, int], Tensor]:
    """A function that makes the rows from ``start`` to ``stop``.

    In sorted order the logits of row ``r`` rise from item ``l`` to the next by ``gap_l (2r - 2l - 1)``: all that the sums of absolute
    differences come to. Two running sums of the gaps therefore give every row, without an n x n matrix.
    """
    check_size("neuralsort", *scores.shape[:-1], k, scores.shape[-1])
    order = descending_order(scores if among is None else among.hide(scores))
    ordered = scores.gather(-1, order)
    gaps = ordered[..., :-1] - ordered[..., 1:]
    if among is not None:
        gaps = torch.where(among.items.gather(-1, order)[..., 1:], gaps, 0.0)
    gaps = gaps.to(wide_dtype(scores))  # the sums are long, and their differences are what counts
    odd = 2.0 * torch.arange(gaps.shape[-1], device=scores.device, dtype=gaps.dtype) + 1
    sums = torch.stack([pad(part.cumsum(-1), (1, 0)) for part in (gaps, gaps * odd)], -2)
    return functools.partial(_some_rows, scores, among, sums, order, column(tau, gaps))


def _some_rows(scores: Tensor, among: Among | None, sums: Tensor, order: Tensor, tau: Number, start: int, stop: int) -> Tensor:
    """The logits ``2 r once - weighted`` of many rows are one product of matrices.

    Each row is told relative to its own item, which has about the largest logit: so what matters is small when it is rounded.
    """
    once, weighted = sums.detach()[..., start:stop].unbind(-2)
    twice = 2.0 * torch.arange(start, stop, device=sums.device, dtype=sums.dtype).expand_as(once)
    left = over(torch.stack([twice, -torch.ones_like(twice), weighted - twice * once], -1), deeper(tau))
    right = torch.cat([_unsort(sums, order.unsqueeze(-2).expand(sums.shape)), torch.ones_like(sums[..., :1, :])], -2)
    items = None if among is None else among.items.unsqueeze(-2)
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad) or in_forward_mode() or not in_reach(scores):
        return torch.softmax(_logits(left, right, items, scores.dtype), -1)
    return _in_pieces(left, right, items, scores.dtype)


def _logits(left: Tensor, right: Tensor, items: Tensor | None, dtype: torch.dtype) -> Tensor:
    logits = (left @ right).to(dtype)
    return logits if items is None else logits.masked_fill(~items, -torch.inf)


def _in_pieces(left: Tensor, right: Tensor, items: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The softmax of so many logits at a time that they stay in the cache: in fresh memory they cost more than their arithmetic."""
    shape = (*left.shape[:-1], right.shape[-1])
    out = torch.empty(shape, dtype=dtype, device=left.device)
    all_out, all_left, all_right = (value.reshape(-1, *value.shape[-2:]) for value in (out, left, right))
    all_items = None if items is None else items.expand(*shape[:-2], 1, shape[-1]).reshape(-1, 1, shape[-1])
    step = max(1, _CACHE // max(1, shape[-2] * shape[-1]))
    for i in range(0, len(all_out), step):
        some = slice(i, i + step)
        logits = _logits(all_left[some], all_right[some], None if all_items is None else all_items[some], dtype)
        torch.softmax(logits, -1, out=all_out[some])
    return out


def _unsort(values: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(values).scatter(-1, order, values)


def _matrix(scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    return _rows(scores, k, tau, among)(0, k)


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    return mask_by_rows(_rows(scores, k, tau, among), scores, k, among)


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    return select_by_rows(_rows(scores, k, tau, among), x, scores, k)


@relaxation(
    "neuralsort",
    kind="matrix",
    cost="O(n log n + nk)",
    paper="Grover, Wang, Zweig, Ermon 2019",
    mask=_mask,
    select=_select,
    special=_matrix,
    smooth=False,
    bounded=False,
    monotone=False,
    complete=False,
)
def neuralsort_matrix(scores: Tensor, k: int, tau: Number = 1.0) -> Tensor:
    r"""NeuralSort: the i-th row of a unimodal relaxation of the sorting permutation.

    .. math:: P_i = \mathrm{softmax}_j\bigl(((n + 1 - 2i) x_j - \textstyle\sum_l |x_j - x_l|) / \tau\bigr), \quad i = 1 \dots k

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.

    Returns:
        ``(..., k, n)``, rows that sum to 1. The columns may sum to more than 1.

    Example:
        >>> neuralsort_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2)
        tensor([[0.0132, 0.7214, 0.2654],
                [0.2119, 0.2119, 0.5761]])
    """
    return _matrix(scores, k, tau)
