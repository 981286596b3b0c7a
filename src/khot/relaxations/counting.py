"""The k-th best by counting, with smooth steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from khot._settle import Among
from khot._tensors import Number, column, deeper, is_bare
from khot.primitives.limits import check_size
from khot.primitives.slopes import not_less, over, shortened
from khot.registry import relaxation

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "hat": lambda x: (x + 0.5).clamp(0, 1),
    "gaussian": torch.special.ndtr,
}
_PIECE = 1 << 22  # pairs that are compared at once


def soft_count(scores: Tensor, tau: Number, h: str, among: Among | None = None) -> Tensor:
    r""":math:`\frac12 + \sum_j h((x_j - x_i) / \tau)`: the rank of every item, 1 for the largest, equal for equal scores.

    Long rows are compared in pieces, which the backward pass compares again: O(n^2) time, O(n) memory.

    Args:
        scores: ``(..., n)``.
        tau: temperature, a number or ``(..., 1)``.
        h: a name in ``STEPS``.
        among: which items are counted.
    """
    check_size("counting", *scores.shape, scores.shape[-1], what="table of pairs", fix="use softrank, which costs O(n log n)")
    counted = None if among is None else among.items
    # Sizes are compared only where they are numbers: while a graph is traced the comparison would become a guard.
    traced = is_compiling() or torch.jit.is_tracing() or not is_bare(scores)
    step = scores.shape[-1] if traced else max(1, _PIECE // max(1, scores.numel()))
    if step >= scores.shape[-1]:
        return 0.5 + _above(scores, scores, counted, tau, h)
    parts = [checkpoint(_above, part, scores, counted, tau, h, use_reentrant=False) for part in scores.split(step, -1)]
    return 0.5 + torch.cat(parts, -1)


def _above(part: Tensor, scores: Tensor, counted: Tensor | None, tau: Number, h: str) -> Tensor:
    gaps = scores.unsqueeze(-2) - part.unsqueeze(-1)
    steps = STEPS[h](over(gaps, deeper(tau)))
    return (steps if counted is None else torch.where(counted.unsqueeze(-2), steps, 0.0)).sum(-1)


def _ranks_and_width(scores: Tensor, tau: Number, h: str, delta: str, among: Among | None) -> tuple[Tensor, Number]:
    """The ranks, and the temperature at which they are compared with the places."""
    width, power = column(tau, scores), 3 if delta == "gaussian" else 2  # the slope is a power of 1 / tau
    return shortened(soft_count(scores, width, h, among), width, scores.dtype, power), not_less(width, scores.dtype, power)


def _log_delta(ranks: Tensor, place: Tensor, tau: Number, delta: str) -> Tensor:
    """``log delta(rank - place)`` up to a constant; the first place takes every rank below it too."""
    away = ranks.unsqueeze(-2) - place
    width = deeper(tau)
    if delta == "sigmoid":
        below = logsigmoid(over(0.5 - away, width))
        return torch.where(place == 1, below, below + logsigmoid(over(0.5 + away, width)))
    if delta == "gaussian":
        far = away.abs()
        nearest = far.detach().amin(-1, keepdim=True)  # a constant of the row: without it every square may overflow
        return -over(far - nearest, width) * over(far + nearest, width) / 2
    return _log_hat(away)


def _log_hat(away: Tensor) -> Tensor:
    """Rows that no rank comes near, as when three items tie, take the nearest."""
    hat = 1 - away.abs()
    empty = (hat <= 0).all(-1, keepdim=True)
    nearest = hat >= hat.amax(-1, keepdim=True)
    inside = torch.where(empty, nearest, hat > 0)
    return torch.where(inside, torch.where(inside & ~empty, hat, 1.0).log(), -torch.inf)


def _raw_delta(ranks: Tensor, place: Tensor, tau: Number, delta: str) -> Tensor:
    away = ranks.unsqueeze(-2) - place
    width = deeper(tau)
    if delta == "sigmoid":
        return torch.sigmoid(over(0.5 - away, width)) - torch.where(place == 1, 0.0, torch.sigmoid(over(-0.5 - away, width)))
    return (1 - away.abs()).clamp(min=0) if delta == "hat" else torch.exp(-over(away, width).square() / 2)


def _check(h: str, delta: str) -> None:
    for name, value in (("h", h), ("delta", delta)):
        if value not in STEPS:
            raise ValueError(f"{name} must be one of {', '.join(STEPS)}, got {value!r}")


def _mask(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    h: str = "sigmoid",
    delta: str = "sigmoid",
    normalize: bool = True,
    among: Among | None = None,
) -> Tensor:
    if normalize or delta != "sigmoid":
        matrix = _matrix(scores, k, tau, h=h, delta=delta, normalize=normalize, among=among)
        return (matrix if among is None else torch.where(among.wanted(k), matrix, 0.0)).sum(-2)
    _check(h, delta)
    count = k if among is None else among.k
    ranks, width = _ranks_and_width(scores, tau, h, delta, among)
    mask = torch.sigmoid(over(count + 0.5 - ranks, width))  # the differences telescope
    return mask * (count > 0)


def _matrix(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    h: str = "sigmoid",
    delta: str = "sigmoid",
    normalize: bool = True,
    among: Among | None = None,
) -> Tensor:
    _check(h, delta)
    check_size("counting", *scores.shape[:-1], k, scores.shape[-1])
    ranks, width = _ranks_and_width(scores, tau, h, delta, among)
    place = torch.arange(1, k + 1, device=scores.device, dtype=scores.dtype).unsqueeze(-1)
    if not normalize:
        return _raw_delta(ranks, place, width, delta)
    if among is None:
        return torch.softmax(_log_delta(ranks, place, width, delta), -1)
    ranks = torch.where(among.items, ranks, torch.inf if delta == "hat" else 3.0 * scores.shape[-1])  # nearest to no place
    return torch.softmax(_log_delta(ranks, place, width, delta).masked_fill(~among.items.unsqueeze(-2), -torch.inf), -1)


@relaxation(
    "counting",
    kind="matrix",
    cost="O(n^2)",
    paper="Haurum et al. 2023 (the operator); Qin, Liu, Li 2010 (soft counting)",
    mask=_mask,
    special=_matrix,
    bounded=False,
    monotone=False,
    complete=False,
    scale_free=False,
)
def counting_matrix(
    scores: Tensor, k: int, tau: Number = 1.0, *, h: str = "sigmoid", delta: str = "sigmoid", normalize: bool = True
) -> Tensor:
    r"""Kth-Best by counting: an item is the i-th best if as many as i scores, its own among them, are not below its own.

    .. math:: r_j = \tfrac12 + \sum_l h\bigl((x_l - x_j) / \tau\bigr), \qquad P_{ij} \propto \delta(r_j - i)

    with h a smooth step and :math:`\delta` a smooth indicator of 0. Equal scores share their places equally. The temperature softens
    the comparison of ranks as well, so that huge scores alone do not make the result hard.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.
        h: ``"sigmoid"``, ``"hat"`` (a ramp, the integral of a box) or ``"gaussian"`` (the normal distribution function).
        delta: ``"sigmoid"`` (the difference of two), ``"hat"`` (``max(0, 1 - |r - i|)``) or ``"gaussian"``.
        normalize: let the rows sum to 1. Without it the rows are :math:`\delta` itself, and with sigmoids the mask telescopes to
            :math:`\sigma((k + 1/2 - r) / \tau)`.

    Returns:
        ``(..., k, n)``, rows that sum to 1. The columns may sum to more than 1.

    Example:
        >>> counting_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2, tau=0.1).round(decimals=3)
        tensor([[0.0000, 0.9930, 0.0070],
                [0.0070, 0.0070, 0.9870]])
    """
    return _matrix(scores, k, tau, h=h, delta=delta, normalize=normalize)
