r"""Entropic transport of n items to k ordered places and the rest.

Every item has one unit to send, every place :math:`j \le k` takes one unit, the rest takes what is left. Place ``j`` lies at
:math:`y_j = k + 1 - j`, the rest at 0, and the plan maximises :math:`\sum_{ij} x_i y_j \Gamma_{ij} + \tau H(\Gamma)`, which is the
transport of squared distance. In terms of the cuts :math:`c_l` between neighbouring places it is

.. math:: \Gamma_{ij} = \operatorname{softmax}_j \sum_{l \ge j} (x_i - c_l)/\tau .

A cut is carried as the middle between two neighbours in order, exact for :math:`\tau \to 0`, and an offset in units of tau. The offsets
come from Sinkhorn's iteration and Newton's in turns, whichever leaves the smaller error in the places' sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number, column, readable, wide_dtype

_FAR = 200.0  # in units of tau: what lies this far from a cut is on one side of it to the last digit
_NEAR = 1e-4  # two Newton steps from here are exact
_NUM_EVEN, _NUM_NEWTON = 4, 12  # six of Newton's were the most that 2,000 random problems needed, tau from 1e-3 to 20


class Places(NamedTuple):
    """A transport problem with the quantities that stay fixed while its offsets are searched for."""

    away: Tensor  # (..., n, k) distance to every middle, in units of tau
    open: Tensor  # (..., n, k + 1) whether the item may go there
    full: Tensor  # (..., k) what each place takes: 1, or 0 where items are too few
    closed: Tensor  # (..., 1, 1) whether nothing is left for the rest


def ordered_transport(scores: Tensor, k: int, tau: Number) -> Tensor:
    """The plan as ``(..., k, n)``, rows that sum to 1, in the dtype of the work; exact first and second derivatives.

    Args:
        scores: ``(..., n)``; -inf excludes an item, and places for which no item is left stay empty.
        k: at least 1.
        tau: temperature, a number or ``(...)``.
    """
    x = scores.to(wide_dtype(scores))
    lost = x.isnan().any(-1, keepdim=True)
    places = _places(torch.where(lost, 0.0, x), k, column(tau, x))
    offsets = _search(Places(*(part.detach() for part in places)))
    for _ in range(2):  # one Newton step carries the gradient, the second the gradient of the gradient
        offsets = offsets + _newton(_plan(places, offsets), places)
    plan = _plan(places, offsets).transpose(-1, -2)
    total = plan.sum(-1, keepdim=True)
    plan = plan / torch.where(total > 0, total, 1.0)
    return torch.where(lost.unsqueeze(-1), torch.nan, plan)


def _places(x: Tensor, k: int, tau: Any) -> Places:
    n = x.shape[-1]
    allowed, certain = x > -torch.inf, x == torch.inf
    inner = torch.where(allowed & ~certain, x, 0.0)
    top = torch.where(allowed & ~certain, x, -torch.inf).detach().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    values = torch.where(certain, top + 2 * _FAR * tau, inner)
    order = torch.where(allowed, values, -torch.inf).detach().topk(min(k + 1, n)).values
    order = torch.cat([order, order[..., -1:]], -1) if k == n else order
    upper, lower = order[..., :k], order[..., 1:]
    upper = torch.where(upper.isinf(), 0.0, upper)
    middle = torch.where(lower.isinf(), upper, upper / 2 + lower / 2)
    wide_tau = tau.unsqueeze(-1) if isinstance(tau, Tensor) else tau
    away = ((values.unsqueeze(-1) - middle.unsqueeze(-2)) / wide_tau).clamp(-_FAR, _FAR)
    count = allowed.sum(-1, keepdim=True)
    full = torch.arange(1, k + 1, dtype=torch.long, device=x.device) <= count
    closed = count <= k
    reach = torch.cat([full & allowed.any(-1, keepdim=True), ~closed], -1).unsqueeze(-2)
    return Places(away, allowed.unsqueeze(-1) & reach, full.to(x.dtype), closed.unsqueeze(-1))


def _plan(places: Places, offsets: Tensor) -> Tensor:
    """``(..., n, k)``: how much of every item goes to every place."""
    rise = (places.away + offsets.unsqueeze(-2)).flip(-1).cumsum(-1).flip(-1)
    rise = torch.nn.functional.pad(rise, (0, 1)).masked_fill(~places.open, torch.finfo(rise.dtype).min)
    return (torch.softmax(rise, -1) * places.open)[..., :-1]


def _newton(plan: Tensor, places: Places) -> Tensor:
    """The step in the offsets that fills every place, to first order."""
    sums = plan.sum(-2)
    missing = places.full - sums
    # An empty place has an empty row; a problem without a rest does not change with a constant; a hard plan does not move at all.
    lift = torch.diag_embed(1 - places.full) + places.closed / plan.shape[-1]
    ridge = 1e-14 * torch.eye(plan.shape[-1], dtype=plan.dtype, device=plan.device)
    curvature = torch.diag_embed(sums) - plan.transpose(-1, -2) @ plan + lift + ridge
    return _to_offsets(torch.linalg.solve_ex(curvature, missing.unsqueeze(-1)).result.squeeze(-1))


def _to_offsets(potential: Tensor) -> Tensor:
    """A place's potential is the sum of the offsets from it onwards."""
    return torch.cat([-potential.diff(dim=-1), potential[..., -1:]], -1)


def _search(places: Places) -> Tensor:
    """Offsets that fill every place to within ``_NEAR``, in a bounded number of rounds."""
    offsets = torch.zeros_like(places.full)
    plan = _plan(places, offsets)
    for i in range(_NUM_EVEN + _NUM_NEWTON):
        sums = plan.sum(-2)
        if readable(sums) and bool(((places.full - sums).abs() <= _NEAR).all()):
            break
        offsets, plan = _round(places, offsets, plan, leaps=(1.0, 0.2) if i >= _NUM_EVEN else ())
    return offsets


def _round(places: Places, offsets: Tensor, plan: Tensor, leaps: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Sinkhorn's step, which never makes the error larger, or that part of Newton's which makes it smaller still."""
    uneven = plan.sum(-2).clamp(min=torch.finfo(plan.dtype).tiny)
    best = offsets + _to_offsets(torch.where(places.full > 0, -torch.log(uneven), 0.0))
    best_plan = _plan(places, best)
    step = _newton(plan, places) if leaps else offsets
    for size in leaps:
        leap = offsets + size * step
        leap_plan = _plan(places, leap)
        better = _error(leap_plan, places) < _error(best_plan, places)
        best, best_plan = torch.where(better, leap, best), torch.where(better.unsqueeze(-1), leap_plan, best_plan)
    return best, best_plan


def _error(plan: Tensor, places: Places) -> Tensor:
    return (places.full - plan.sum(-2)).abs().sum(-1, keepdim=True)
