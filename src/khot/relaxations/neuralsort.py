"""NeuralSort."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, deeper
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order
from khot.primitives.pieces import mask_by_rows, select_by_rows
from khot.registry import relaxation


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
    odd = 2.0 * torch.arange(gaps.shape[-1], device=scores.device, dtype=scores.dtype) + 1
    once, weighted = (_unsort(torch.nn.functional.pad(part.cumsum(-1), (1, 0)), order) for part in (gaps, gaps * odd))
    return functools.partial(_some_rows, among, once, weighted, column(tau, scores))


def _unsort(values: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(values).scatter(-1, order, values)


def _some_rows(among: Among | None, once: Tensor, weighted: Tensor, tau: Number, start: int, stop: int) -> Tensor:
    place = torch.arange(start, stop, device=once.device, dtype=once.dtype).unsqueeze(-1)
    logits = (2 * place * once.unsqueeze(-2) - weighted.unsqueeze(-2)) / deeper(tau)
    return torch.softmax(logits if among is None else logits.masked_fill(~among.items.unsqueeze(-2), -torch.inf), -1)


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
