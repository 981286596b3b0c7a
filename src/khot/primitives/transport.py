r"""Entropic transport of n items to k ordered places and the rest.

Every item has one unit to send, every place :math:`j \le k` takes one unit, the rest takes what is left. Place ``j`` lies at
:math:`y_j = k + 1 - j`, the rest at 0, and the plan maximises :math:`\sum_{ij} x_i y_j \Gamma_{ij} + \tau H(\Gamma)`, which is the
transport of squared distance:

.. math:: \Gamma_{ij} = \operatorname{softmax}_j (x_i y_j / \tau + g_j), \qquad \textstyle\sum_i \Gamma_{ij} = 1 .

The potentials :math:`g` start from the cuts half-way between neighbours in order, exact for :math:`\tau \to 0`. Two of Sinkhorn's steps
bring them near, Newton's steps, none longer than ``_LEAP``, solve for them. The backward pass needs the
plan and one system of k equations, see :mod:`khot.primitives.transport_gradient`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, in_forward_mode, in_transform, readable, wide_dtype
from khot.primitives.operators import define, derive
from khot.primitives.transport_gradient import curvature, plan_gradients

_FAR = 200.0  # in units of tau: what lies this far from a cut is on one side of it to the last digit
_LEAP = 2.0  # the longest step in a potential; from there on 2,000 random problems needed at most six, tau from 1e-3 to 20
_NEAR = 1e-2  # an error from which Newton's steps at least halve it, but for rounding
_NUM_EVEN, _NUM_NEWTON = 2, 12
_SMALL = 1 << 16  # numbers of a plan
_CACHE = 1 << 19  # numbers of a plan that are worked on at once


class Places(NamedTuple):
    """A transport problem with the quantities that stay fixed while its potentials are searched for."""

    rise: Tensor  # (..., n, k + 1): the exponents at potential 0, the rest last; -inf where an item may not go
    full: Tensor  # (..., k): what each place takes: 1, or 0 where items are too few
    closed: Tensor  # (..., 1, 1): whether nothing is left for the rest


def ordered_transport(scores: Tensor, k: int, tau: Number, among: Among | None = None) -> Tensor:
    """The plan as ``(..., k, n)``, rows that sum to 1; exact first and second derivatives.

    Args:
        scores: ``(..., n)``, finite.
        k: at least 1.
        tau: temperature, a number or ``(...)``.
        among: which items take part and how many places there are for them; the other places stay empty.
    """
    tau = column(tau, scores)
    items, count = (None, None) if among is None else among
    if in_transform() or in_forward_mode():
        return _by_steps(scores, k, tau, items, count).mT
    rows, value = (tau, 0.0) if isinstance(tau, Tensor) else (None, tau)
    return torch.ops.khot.transport(scores, rows, value, k, items, count).mT


def _by_steps(x: Tensor, k: int, tau: Number, items: Tensor | None, count: Tensor | None) -> Tensor:
    """The plan, differentiable by every means: one Newton step carries the gradient, the second the gradient of the gradient."""
    places = _places(x.to(wide_dtype(x)), k, tau, items, count)
    potential = _search(Places(*(part.detach() for part in places))).potential
    for _ in range(2):
        potential = potential + _newton(_at(places, potential), places)
    return _normalised(_at(places, potential).plan).to(x.dtype)


def _solve(x: Tensor, tau: Tensor | None, tau_value: float, k: int, items: Tensor | None, count: Tensor | None) -> Tensor:
    """The plan ``(..., n, k)``, without gradient; on a CPU by as many rows at a time as fit into the cache."""
    n, rows = x.shape[-1], x.shape[:-1].numel()
    step = max(1, _CACHE // (n * (k + 1)))
    if not readable(x) or step >= rows:
        return _solve_some(x.detach(), tau, tau_value, k, items, count)
    flat = [value if value is None else value.detach().expand(*x.shape[:-1], -1).reshape(rows, -1) for value in (x, tau, items, count)]
    plan = x.new_empty((rows, n, k))
    for i in range(0, rows, step):
        part, *rest = (value if value is None else value[i : i + step] for value in flat)
        plan[i : i + step] = _solve_some(part, rest[0], tau_value, k, *rest[1:])
    return plan.view(*x.shape, k)


def _solve_some(x: Any, tau: Tensor | None, tau_value: float, k: int, items: Tensor | None, count: Tensor | None) -> Tensor:
    # A small plan is searched for in float64, which costs little; the potentials of a large one need no more digits than it has.
    work = x.to(wide_dtype(x)) if x.numel() * (k + 1) <= _SMALL else x
    return _normalised(_search(_places(work, k, tau_value if tau is None else tau, items, count)).plan).to(x.dtype)


def _normalised(plan: Tensor) -> Tensor:
    plan = plan[..., :-1]
    total = plan.sum(-2, keepdim=True, dtype=wide_dtype(plan))
    return plan / torch.where(total > 0, total, 1.0).to(plan.dtype)


def _places(x: Tensor, k: int, tau: Number, items: Tensor | None, count: Tensor | None) -> Places:
    n, wide = x.shape[-1], x.to(wide_dtype(x))
    hidden = wide.detach() if items is None else wide.detach().masked_fill(~items, -torch.inf)
    order = hidden.topk(min(k + 1, n)).values
    order = torch.cat([order, order[..., -1:]], -1) if k == n else order
    middle = _middle(order[..., :k], order[..., 1:])
    every = torch.ones_like(middle, dtype=torch.bool)
    full = every if count is None else torch.arange(k, dtype=torch.long, device=x.device) < count
    left = n if items is None else items.sum(-1, keepdim=True)
    closed = (left <= full.sum(-1, keepdim=True)).unsqueeze(-1)
    rise = torch.nn.functional.pad(_rise(wide, middle, full, tau), (0, 1))
    if items is not None or k == n:
        there = torch.ones_like(hidden, dtype=torch.bool) if items is None else items
        shut = torch.cat([~(full.unsqueeze(-2) & there.unsqueeze(-1)), closed & there.unsqueeze(-1)], -1)
        rise = rise.masked_fill(shut, -torch.inf)  # who takes no part goes to the rest
    # The largest exponent of an item is taken off before rounding, so that what counts keeps its digits.
    return Places((rise - rise.detach().amax(-1, keepdim=True)).to(x.dtype), full.to(x.dtype), closed)


def _middle(upper: Tensor, lower: Tensor) -> Tensor:
    """Half-way between neighbours in order; at the upper one where nothing is below it, at 0 where neither is."""
    upper = torch.where(upper.isinf(), 0.0, upper)
    return torch.where(lower.isinf(), upper, upper / 2 + lower / 2)


def _rise(x: Tensor, middle: Tensor, full: Tensor, tau: Number) -> Tensor:
    """``(..., n, k)``: how much an item gains by going to a place, summed over the cuts that it passes from the rest on."""
    k = middle.shape[-1]
    tau_rows: Any = tau.unsqueeze(-1) if isinstance(tau, Tensor) else tau
    centre = middle[..., -1:]
    far = (x.detach() - centre).abs().amax(-1, keepdim=True) / tau
    if readable(far) and bool((far * k < 1e8).all()) and bool(full.all()):  # no sum can lose its digits
        height = torch.arange(k, 0, -1, dtype=x.dtype, device=x.device)
        passed = ((middle - centre) / tau).flip(-1).cumsum(-1).flip(-1)
        return torch.addcmul(-passed.unsqueeze(-2), ((x - centre) / tau).unsqueeze(-1), height)
    away = ((x.unsqueeze(-1) - middle.unsqueeze(-2)) / tau_rows).clamp(-_FAR, _FAR)
    return torch.where(full.unsqueeze(-2), away, 0.0).flip(-1).cumsum(-1).flip(-1)


class _State(NamedTuple):
    """Where the search is."""

    potential: Tensor  # (..., k)
    plan: Tensor  # (..., n, k + 1): how much of every item goes to every place and to the rest
    sums: Tensor  # (..., k): what every place has
    error: Tensor  # (..., 1)


def _at(places: Places, potential: Tensor) -> _State:
    plan = torch.softmax(places.rise + torch.nn.functional.pad(potential, (0, 1)).unsqueeze(-2), -1)
    sums = plan.sum(-2)[..., :-1]
    return _State(potential, plan, sums, (places.full - sums).detach().abs().amax(-1, keepdim=True))


def _bend(state: _State, places: Places) -> Tensor:
    plan = state.plan[..., :-1]
    return curvature(plan.mT @ plan, state.sums, places.full, places.closed)


def _newton(state: _State, places: Places, bend: Tensor | None = None) -> Tensor:
    """The step in the potentials that fills every place, to first order; ``bend`` is the curvature, where it is known."""
    bend = _bend(state, places) if bend is None else bend
    if in_transform():  # vmap of a jacfwd of solve is wrong from the second row on, as of torch 2.13
        return (torch.linalg.inv_ex(bend).inverse @ (places.full - state.sums).unsqueeze(-1)).squeeze(-1)
    return torch.linalg.solve_ex(bend, (places.full - state.sums).unsqueeze(-1)).result.squeeze(-1)


def _search(places: Places) -> _State:
    """Potentials that fill every place to rounding, in a bounded number of rounds."""
    state = _at(places, torch.zeros_like(places.full))
    for _ in range(_NUM_EVEN):
        state = _even(places, state)
    reads, eps, bend, stale = readable(state.error), torch.finfo(state.error.dtype).eps, None, 1.0
    for _ in range(_NUM_NEWTON):
        worst = float(state.error.max()) if reads and state.error.numel() else 1.0
        if worst <= 16 * eps:
            break
        if worst * stale**2 > eps:  # else two steps with the last curvature, which is most of the work, get there too
            bend, stale = _bend(state, places), worst
        before, state = state.error, _leap(places, state, bend)
        small = torch.finfo(before.dtype).eps ** 0.5
        if readable(before) and bool(((before < small) & (state.error > before / 4)).all()):  # what is left is rounding
            break
    return state


def _even(places: Places, state: _State) -> _State:
    """Sinkhorn's step, which never makes the error larger."""
    uneven = state.sums.clamp(min=torch.finfo(state.sums.dtype).tiny)
    return _at(places, state.potential - torch.where(places.full > 0, torch.log(uneven), 0.0))


def _leap(places: Places, state: _State, bend: Tensor | None) -> _State:
    """Newton's step with this curvature; a row in which it makes a large error larger takes Sinkhorn's."""
    leapt = _at(places, state.potential + _newton(state, places, bend).clamp(-_LEAP, _LEAP))
    worse = ~(leapt.error < 2 * state.error.clamp(min=_NEAR))
    if readable(worse) and not bool(worse.any()):
        return leapt
    return _at(places, torch.where(worse, _even(places, state).potential, leapt.potential))


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tau, ctx.tau, ctx.k, items, count = inputs
    ctx.learns_tau, ctx.hides = tau is not None, items is not None
    ctx.save_for_backward(output, x, *(value for value in (tau, items, count) if value is not None))


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    plan, x, *rest = ctx.saved_tensors
    tau = rest.pop(0) if ctx.learns_tau else None
    items, count = rest if ctx.hides else (None, None)
    in_x, in_tau = plan_gradients(grad, plan, x, tau, ctx.tau, ctx.k, items, count)
    return in_x, in_tau if ctx.learns_tau else None, None, None, None, None


def _fake(x: Tensor, tau: Tensor | None, tau_value: float, k: int, items: Tensor | None, count: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape, k))


# One operator, so that no compiler unrolls the search.
_NAME = define("transport(Tensor x, Tensor? tau, float tau_value, SymInt k, Tensor? items, Tensor? count) -> Tensor", _solve, _fake)
derive(_NAME, _derivative, _context)
