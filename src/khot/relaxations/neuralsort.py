"""NeuralSort."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from khot._tensors import Number, column
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order
from khot.primitives.settle import deeper, finite_part, mask_by_rows, select_by_rows, settle_rows
from khot.registry import relaxation


def _rows(scores: Tensor, k: int, tau: Number) -> Callable[[int, int], Tensor]:
    """A function that makes the rows from ``start`` to ``stop``.

    In sorted order the logits of row ``r`` rise from item ``l`` to the next by ``gap_l (2r - 2l - 1)``: all that the sums of absolute
    differences come to. Two running sums of the gaps therefore give every row, without an n x n matrix.
    """
    check_size("neuralsort", *scores.shape[:-1], k, scores.shape[-1])
    safe, open_columns = finite_part(scores)
    order = descending_order(scores)
    ordered, inside = safe.gather(-1, order), scores.gather(-1, order).isfinite()
    gaps = torch.where(inside[..., 1:] & inside[..., :-1], ordered[..., :-1] - ordered[..., 1:], 0.0)
    odd = 2.0 * torch.arange(gaps.shape[-1], device=scores.device, dtype=scores.dtype) + 1
    once, weighted = (_unsort(torch.nn.functional.pad(part.cumsum(-1), (1, 0)), order) for part in (gaps, gaps * odd))
    return functools.partial(_some_rows, scores, open_columns, once, weighted, column(tau, scores))


def _unsort(values: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(values).scatter(-1, order, values)


def _some_rows(scores: Tensor, open_columns: Tensor, once: Tensor, weighted: Tensor, tau: Number, start: int, stop: int) -> Tensor:
    place = torch.arange(start, stop, device=scores.device, dtype=scores.dtype).unsqueeze(-1)
    logits = (2 * place * once.unsqueeze(-2) - weighted.unsqueeze(-2)) / deeper(tau)
    return settle_rows(torch.softmax(logits.masked_fill(~open_columns.unsqueeze(-2), -torch.inf), -1), scores, start)


def _mask(scores: Tensor, k: int, tau: Number = 1.0) -> Tensor:
    return mask_by_rows(_rows(scores, k, tau), scores, k)


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0) -> Tensor:
    return select_by_rows(_rows(scores, k, tau), x, scores, k)


@relaxation(
    "neuralsort",
    kind="matrix",
    cost="O(n log n + nk)",
    paper="Grover, Wang, Zweig, Ermon 2019",
    mask=_mask,
    select=_select,
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
    return _rows(scores, k, tau)(0, k)
