"""The logarithm of a soft mask, exact where the mask itself underflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._tensors import Number, column, is_recorded
from khot.checks import door
from khot.loss import threshold_family
from khot.primitives.threshold.autograd import both_by_operator, mask_and_shift, solve_mask
from khot.primitives.threshold.family import Family

_STEEPEST = 80.0  # of the logarithm of the derivative in k: its exponential is a number of float32
_ROUNDS = 12  # on a plateau the equation is straight; elsewhere the first is enough


def log_soft_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, method: str = "sigmoid", dim: int = -1, **options: Any) -> Tensor:
    r"""The logarithm of :func:`khot.soft_topk`, for cross entropies and log-likelihoods.

    .. math:: \log y_i = \log F(x_i / \tau + c), \quad \textstyle\sum_i y_i = k

    Where a mask has underflowed to 0 its logarithm is still exact for the smooth families, and has a gradient. Derivatives are exact
    up to the third.

    Args:
        scores: any shape; -inf excludes an item.
        k: how many; may be fractional and may differ per row.
        tau: temperature.
        method: a threshold method: sigmoid, euclidean, laplace, gaussian, entmax or permutahedron.
        dim: the dimension to select along.
        options: the method's own.

    Returns:
        Like ``scores``, at most 0.

    Example:
        >>> log_soft_topk(torch.tensor([200.0, 0.0, -50.0]), k=1)[1:]
        tensor([-100., -150.])
    """
    return _log(scores, k, tau, dim=dim, family=threshold_family(method, options))


def _log_of(scores: Tensor, k: Number, tau: Number, *, family: Family) -> Tensor:
    if family.log_f is None or family.log_slope is None or not scores.shape[-1]:
        y = solve_mask(scores, k, tau, family)
        return torch.where(y == 0, -torch.inf, torch.where(y == 0, 1.0, y).log())
    k, tau = column(k, scores), column(tau, scores)
    with torch.no_grad():
        y, t = (both_by_operator if is_recorded() else mask_and_shift)(scores, k, tau, family)
    rest = k - (scores == torch.inf).sum(-1, keepdim=True, dtype=scores.dtype)  # those at +inf come first
    ordinary = scores.isfinite() & t.isfinite() & (rest > 0)
    ordinary = ordinary & (rest < ordinary.sum(-1, keepdim=True))
    away = (torch.where(ordinary, scores, 0.0) - torch.where(t.isfinite(), t, 0.0)) / tau
    u = away + _shift(away, rest, ordinary, family)
    return torch.where(ordinary, family.log_f(u), y.log())


_log = door(_log_of, name="log_soft_topk", options=None, native_half=False, fractional=True)


def _shift(away: Tensor, k: Tensor, ordinary: Tensor, family: Family) -> Tensor:
    """What is left of the shift, and its derivatives.

    The first is the mean of the others' moves, weighed by their slopes. With it the shift is right to first order in a move of the
    scores, and one more Newton step, which changes no value, makes that third order.
    """
    assert family.log_slope is not None
    still = away.detach()  # without tangents too, which no_grad leaves
    with torch.no_grad():
        s = _polish(still, k.detach(), ordinary, family)
        slope = torch.where(ordinary, family.log_slope(still + s), -torch.inf)
        total = slope.logsumexp(-1, keepdim=True)
        weight = torch.where(total > -torch.inf, (slope - total).exp(), 0.0)
    s = s - (weight * (away - still)).sum(-1, keepdim=True)
    # The derivative in k grows without bound as the row saturates.
    s = s + (k - k.detach()) * (-total).clamp(max=_STEEPEST).exp()
    step = _step(away + s, torch.where(-total > _STEEPEST, k.detach(), k), ordinary, family)
    return s + (step - step.detach())


def _polish(away: Tensor, k: Tensor, ordinary: Tensor, family: Family) -> Tensor:
    """The shift at which those below have as much as those above lack."""
    s = torch.zeros_like(away[..., :1])
    for _ in range(_ROUNDS):
        s = s + _step(away + s, k, ordinary, family)
    return s


def _step(u: Tensor, k: Tensor, ordinary: Tensor, family: Family) -> Tensor:
    """A Newton step on the logarithm of what those above lack over what those below have."""
    assert family.log_f is not None and family.log_slope is not None
    below, above = ordinary & (u < 0), ordinary & (u >= 0)
    tail, slope = family.log_f(torch.where(u < 0, u, -u)), family.log_slope(u)
    missing = k - above.sum(-1, keepdim=True)
    have, lack = _total(tail, below, -missing), _total(tail, above, missing)
    fine = (have > -torch.inf) & (lack > -torch.inf)
    have, lack = torch.where(fine, have, 0.0), torch.where(fine, lack, 0.0)
    # A whole k with as many above is in neither sum, but its derivative is.
    lack = lack + torch.where(missing == 0, missing * (-lack).clamp(max=_STEEPEST).exp(), 0.0).log1p()
    rate = (_total(slope, below) - have).exp() + (_total(slope, above) - lack).exp()
    step = (lack - have) / torch.where(fine & (rate > 0), rate, 1.0)
    return torch.where(fine & (rate > 0) & step.isfinite(), step, 0.0).to(u.dtype)


def _total(logs: Tensor, among: Tensor, more: Tensor | None = None) -> Tensor:
    """The logarithm of a sum of exponentials, and of one number more where that is positive; -inf for nothing, without a nan behind it."""
    terms = torch.where(among, logs, -torch.inf)
    if more is not None:
        there = more > 0
        terms = torch.cat((terms, torch.where(there, torch.where(there, more, 1.0).log(), -torch.inf).to(terms.dtype)), -1)
    empty = terms.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.where(empty, -torch.inf, torch.where(empty, 0.0, terms).logsumexp(-1, keepdim=True))
