r"""Successive halving as a bracket: for every place a binary tree of duels, with its items as leaves from left to right.

The seeding is found first, without gradient, and written down as the leaves. What they weigh is then one formula, in which every
round only meets neighbours: of values :math:`a` and :math:`b` the first keeps the share :math:`s = \sigma(C (a - b) / \tau)`, and
:math:`s a + (1 - s) b` goes on. The weight of a leaf is the product of the shares on its way up.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot import kernels
from khot._settle import ordinary
from khot._tensors import Number, column, deeper, in_forward_mode, readable
from khot.primitives.order import descending_order, sort_descending
from khot.primitives.slopes import over

BASE = 20.0  # of the published power boost


class Rules(NamedTuple):
    """How a duel is decided."""

    boost: float
    power: bool


class Bracket(NamedTuple):
    """What comes out in each place: items and their weights, both ``(..., k, 2^rounds)``, neighbours meeting first.

    Where the best meet nobody in the first round, they meet themselves, with weight 0.
    """

    leaves: Tensor
    weight: Tensor


def num_rounds(n: int, k: int) -> int:
    """The least ``r`` with ``k 2^r >= n``."""
    return (int(-(-n // k)) - 1).bit_length()  # a tracer has tensors for sizes


def play(scores: Tensor, k: int, tau: Number, rules: Rules) -> Bracket:
    """``(..., n)`` scores to ``k`` places, differentiable in ``scores`` and ``tau``."""
    if not k:
        return Bracket(torch.empty(*scores.shape[:-1], 0, 1, dtype=torch.long, device=scores.device), scores[..., :0].unsqueeze(-1))
    tau = column(tau, scores)
    native = kernels.pick("tournament", scores, tau) if not in_forward_mode() else None
    learns = torch.is_grad_enabled() and (scores.requires_grad or isinstance(tau, Tensor) and tau.requires_grad)
    if native is None:
        found = _seed(scores.detach(), k, tau.detach() if isinstance(tau, Tensor) else tau, rules)
        if readable(scores) and not learns and not in_forward_mode():
            return found
        return Bracket(found.leaves, _weigh(scores, found.leaves, tau, rules))
    if learns:
        return Bracket(*_Native.apply(scores, tau, k, rules, native))
    return Bracket(*native.forward(scores, k, num_rounds(scores.shape[-1], k), tau, *rules))


class _Native(Function):
    """Keeps the scores and the leaves; a gradient that is differentiated again goes through the formula."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, tau: Number, k: int, rules: Rules, native: Any) -> tuple[Tensor, Tensor]:
        leaves, weight = native.forward(scores, k, num_rounds(scores.shape[-1], k), tau, *rules)
        learns_tau = isinstance(tau, Tensor)
        ctx.rules, ctx.native, ctx.tau = rules, native, None if learns_tau else tau
        ctx.mark_non_differentiable(leaves)
        ctx.save_for_backward(scores, leaves, *((tau,) if learns_tau else ()))
        return leaves, weight

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, leaves, *rest = ctx.saved_tensors
        tau = rest[0] if rest else ctx.tau
        if torch.is_grad_enabled() or in_forward_mode() or kernels.pick("tournament", scores, tau, grad) is not ctx.native:
            return *gradients(grad, scores, leaves, tau, ctx.rules, ctx.needs_input_grad), None, None, None
        in_scores, in_tau = ctx.native.backward(grad, scores, leaves, tau, *ctx.rules)
        return in_scores, in_tau.to(scores.dtype) if rest else None, None, None, None


def gradients(grad: Tensor, scores: Tensor, leaves: Tensor, tau: Number, rules: Rules, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """The same by the formula, so that it can be differentiated itself."""
    again = torch.is_grad_enabled()
    inputs = [value for value, need in zip((scores, tau), needed, strict=False) if need and isinstance(value, Tensor)]
    with torch.enable_grad():
        weight = _weigh(scores, leaves, tau, rules)
    found = iter(torch.autograd.grad(weight, inputs, grad, create_graph=again, materialize_grads=True))
    return [next(found) if need else None for need in needed[:2]]


def _seed(scores: Tensor, k: int, tau: Number, rules: Rules) -> Bracket:
    """All rounds, then every pair back to the two that met in it; without gradient."""
    finite, values, played = ordinary(scores), scores, []
    byes = (k << num_rounds(scores.shape[-1], k)) - scores.shape[-1]
    while values.shape[-1] > k:
        ordered, order = sort_descending(values, sorted_nearly=len(played) > 0)
        half = (ordered.shape[-1] + byes) // 2
        values, share = _duel(ordered[..., byes:half], ordered[..., half:].flip(-1), tau, rules, finite)
        if byes:
            order = torch.cat([order, order[..., :byes].flip(-1)], -1)
            share = torch.cat([_keeps_all(share).expand(*share.shape[:-2], byes, 2), share], -2)
            values, byes = torch.cat([ordered[..., :byes], values], -1), 0
        played.append((torch.stack([order[..., :half], order[..., half:].flip(-1)], -1), share))
    if not played:
        leaves = descending_order(scores).unsqueeze(-1)
        return Bracket(leaves, _settled(torch.ones_like(leaves, dtype=scores.dtype), scores, leaves))
    leaves, weight = played.pop()
    for pair, share in reversed(played):
        index = leaves.flatten(-2).unsqueeze(-1).expand(*leaves.shape[:-2], -1, 2)
        leaves = pair.gather(-2, index).unflatten(-2, (k, -1)).flatten(-2)
        weight = (share.gather(-2, index).unflatten(-2, (k, -1)) * weight.unsqueeze(-1)).flatten(-2)
    return Bracket(leaves, weight if finite else _settled(weight, scores, leaves))


def _settled(weight: Tensor, scores: Tensor, leaves: Tensor) -> Tensor:
    """An item at -inf weighs nothing, a nan makes its row nan."""
    there = _at(scores.detach(), leaves) > -torch.inf
    return torch.where(there, weight, 0.0).masked_fill(scores.isnan().any(-1)[..., None, None], torch.nan)


def _at(scores: Tensor, leaves: Tensor) -> Tensor:
    return scores.gather(-1, leaves.flatten(-2)).unflatten(-1, leaves.shape[-2:])


def _weigh(scores: Tensor, leaves: Tensor, tau: Number, rules: Rules) -> Tensor:
    """The weights of the leaves, differentiable."""
    finite, tau = ordinary(scores), deeper(tau)
    value, shares = _at(scores, leaves), []
    while value.shape[-1] > 1:
        value, share = _duel(*value.unflatten(-1, (-1, 2)).unbind(-1), tau, rules, finite)
        shares.append(share)
    if shares and scores.shape[-1] < leaves.shape[-2] * leaves.shape[-1]:
        shares[0] = _with_byes(shares[0], leaves)
    weight = value.masked_fill(torch.ones_like(value, dtype=torch.bool), 1.0)  # has a gradient, if none but 0, without a round too
    for share in reversed(shares):
        weight = (weight.unsqueeze(-1) * share).flatten(-2)
    return weight if finite else _settled(weight, scores, leaves)


def _with_byes(share: Tensor, leaves: Tensor) -> Tensor:
    """An item paired with itself keeps its weight."""
    first, second = leaves.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.where((first == second).unsqueeze(-1), _keeps_all(share), share)


def _keeps_all(share: Tensor) -> Tensor:
    return torch.tensor([1.0, 0.0], dtype=share.dtype, device=share.device)


def _duel(best: Tensor, worst: Tensor, tau: Number, rules: Rules, finite: bool) -> tuple[Tensor, Tensor]:
    """The value that goes on, and the shares of the two in a new last dimension."""
    if not finite:
        return _guarded_duel(best, worst, tau, rules)
    lead = BASE ** (best / tau) - BASE ** (worst / tau) if rules.power else over((best - worst) * rules.boost, tau)
    lose = torch.sigmoid(-lead)  # the small one of the two: its derivative keeps its digits where the other is rounded to 1
    return best - (best - worst) * lose, torch.stack([1 - lose, lose], -1)


def _guarded_duel(best: Tensor, worst: Tensor, tau: Number, rules: Rules) -> tuple[Tensor, Tensor]:
    """The same where scores may be infinite: -inf weighs 0, two at +inf weigh the same."""
    real = best.isfinite() & worst.isfinite()
    after, share = _duel(torch.where(real, best, 0.0), torch.where(real, worst, 0.0), tau, rules, finite=True)
    half = 0.5 * (best == torch.inf)
    certain = torch.where(best == worst, half, (best > worst).to(best.dtype))
    others = torch.where(best == worst, half, (worst > best).to(best.dtype))
    return torch.where(real, after, best), torch.where(real.unsqueeze(-1), share, torch.stack([certain, others], -1))
