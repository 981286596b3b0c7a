"""Iterated softmax with the winners taken out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, deeper, in_forward_mode, is_traced, readable
from khot.primitives.limits import check_size
from khot.primitives.peaks import Peaks
from khot.primitives.pieces import mask_by_rows, select_by_rows
from khot.primitives.slopes import over
from khot.registry import relaxation

_DTYPES = (torch.float32, torch.float64)
_LEAST, _MOST = 1e-15, 1e15  # numbers that may be squared


def _rows(scores: Tensor, k: int, tau: Number, alpha: float, among: Among | None) -> Callable[[int, int], Tensor]:
    """A function that makes the rows from ``start`` to ``stop``; all rows are known at once, from the order of the ``k`` largest."""
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}; the larger, the harder each row")
    check_size("iterative", *scores.shape[:-1], k, scores.shape[-1])
    index = (scores.detach() if among is None else among.hide(scores)).topk(k).indices
    top, width = scores.gather(-1, index), column(tau, scores)
    most = _farthest(scores.detach(), width)
    if among is None and most is None:
        return functools.partial(_some_rows, scores, top, index, width / alpha**0.5)
    turn = torch.full_like(scores, k, dtype=torch.long)
    places = torch.arange(k, dtype=torch.long, device=scores.device).expand_as(index)
    turn = turn.scatter(-1, index, places).unsqueeze(-2)  # the row that takes the item out
    return functools.partial(_some_special_rows, scores, among, top, turn, width, alpha, most)


def _farthest(scores: Tensor, tau: Number) -> float | None:
    """Where a gap has to be cut: its square shall be a number. So far out the softmax is 0, and so is its gradient."""
    if readable(scores) and not (isinstance(tau, Tensor) and not readable(tau)):
        gap = (scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)) / tau
        if math.isfinite(gap.square().sum().item()):
            return None
    return torch.finfo(scores.dtype).max ** 0.25


def _some_rows(scores: Tensor, top: Tensor, index: Tensor, unit: Number, start: int, stop: int) -> Tensor:
    """Only items among the ``k`` largest are ever taken out: their logits are made apart and written over the others."""
    mine = top[..., start:stop, None]
    logits, of_top = (_minus_square(over(mine - other.unsqueeze(-2), deeper(unit))) for other in (scores, top))
    row = torch.arange(start, stop, dtype=torch.long, device=scores.device).unsqueeze(-1)
    gone = torch.arange(top.shape[-1], dtype=torch.long, device=scores.device) < row
    return torch.softmax(logits.scatter(-1, index.unsqueeze(-2).expand(of_top.shape), of_top.masked_fill(gone, -torch.inf)), -1)


def _minus_square(gap: Tensor) -> Tensor:
    return torch.addcmul(gap.new_zeros(()), gap, gap, value=-1)  # one pass


def _some_special_rows(
    scores: Tensor,
    among: Among | None,
    top: Tensor,
    turn: Tensor,
    tau: Number,
    alpha: float,
    most: float | None,
    start: int,
    stop: int,
) -> Tensor:
    row = torch.arange(start, stop, dtype=torch.long, device=scores.device).unsqueeze(-1)
    gap = over(top[..., start:stop, None] - scores.unsqueeze(-2), deeper(tau))
    gap = gap if most is None else gap.clamp(-most, most)
    gone = turn < row
    if among is not None:  # a row without any item left keeps the one that is its own, so that no softmax is empty
        gone = (gone | ~among.items.unsqueeze(-2)) & (turn != row)
    return torch.softmax((-alpha * gap.square()).masked_fill(gone, -torch.inf), -1)


def _peaks(scores: Tensor, k: int, tau: Number, alpha: float, among: Among | None, summed: bool) -> Tensor | None:
    """The matrix, or its rows ``summed``, by blocks; ``None`` where the steps must be visible or have another form."""
    plain = among is None and not isinstance(tau, Tensor) and scores.numel() and k > 0 and _LEAST < alpha < _MOST
    if not plain or is_traced() or in_forward_mode() or not readable(scores) or scores.dtype not in _DTYPES:
        return None
    check_size("iterative", *scores.shape[:-1], k, scores.shape[-1])
    if not (_LEAST < tau < _MOST and float(scores.detach().abs().amax()) < _MOST * tau):
        return None
    n = scores.shape[-1]
    flat = scores.reshape(-1, n)

    def again(scores: Tensor) -> Tensor:
        matrix = _rows(scores, k, tau, alpha, None)(0, k)
        return matrix.sum(-2) if summed else matrix

    out = Peaks.apply(flat, flat.detach().topk(k).indices, alpha / tau**2, summed, again)
    return out.reshape(*scores.shape[:-1], *(() if summed else (k,)), n)


def _matrix(scores: Tensor, k: int, tau: Number = 1.0, *, alpha: float = 2.0, among: Among | None = None) -> Tensor:
    found = _peaks(scores, k, tau, alpha, among, summed=False)
    if found is not None:
        return found
    return _rows(scores, k, tau, alpha, among)(0, k)


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, alpha: float = 2.0, among: Among | None = None) -> Tensor:
    found = _peaks(scores, k, tau, alpha, among, summed=True)
    if found is not None:
        return found
    return mask_by_rows(_rows(scores, k, tau, alpha, among), scores, k, among)


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, alpha: float = 2.0, among: Among | None = None) -> Tensor:
    return select_by_rows(_rows(scores, k, tau, alpha, among), x, scores, k)


@relaxation(
    "iterative",
    kind="matrix",
    cost="O(nk)",
    paper="Goyal, Neubig, Dyer, Berg-Kirkpatrick 2018",
    mask=_mask,
    select=_select,
    special=_matrix,
    smooth=False,
    bounded=False,
    monotone=False,
    flat_limit=False,
    ties_equal=False,
    complete=False,
)
def iterative_matrix(scores: Tensor, k: int, tau: Number = 1.0, *, alpha: float = 2.0) -> Tensor:
    r"""Continuous relaxation of beam search's top-k: k peaked softmaxes, each without the winners before it.

    .. math:: P_{ij} \propto \exp\bigl(-\alpha (x_{(i)} - x_j)^2 / \tau^2\bigr) \text{ over the items that have not won yet}

    with :math:`x_{(i)}` the i-th largest, which is the largest of those. Equal scores win in any order.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.
        alpha: how peaked; 2 gives the published figures, large values the hard top-k.

    Returns:
        ``(..., k, n)``, rows that sum to 1. The columns may sum to more than 1.

    Example:
        >>> iterative_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2)
        tensor([[2.9539e-04, 8.8054e-01, 1.1917e-01],
                [1.1920e-01, 0.0000e+00, 8.8080e-01]])
    """
    return _matrix(scores, k, tau, alpha=alpha)
