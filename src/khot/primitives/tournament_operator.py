"""Successive halving as operators of PyTorch: what compilers see, in shapes that do not depend on the number of rounds.

Every item ends in one place. So the result is told item by item: its place and its weight there, both like the scores.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, column
from khot.primitives.operators import define_rows, derive
from khot.primitives.tournament import Bracket, Rules, gradients, play

_RULES = "SymInt k, float boost, bool power"
_FORWARD = f"halving(Tensor scores, Tensor? tau, float tau_value, {_RULES}) -> (Tensor, Tensor)"
_BACKWARD = f"halving_backward(Tensor grad, Tensor scores, Tensor? tau, float tau_value, {_RULES}) -> (Tensor, Tensor)"


class Placed(NamedTuple):
    """For each item the place it ends in, and its weight there, both ``(..., n)``."""

    place: Tensor
    weight: Tensor


def placed(scores: Tensor, k: int, tau: Number, rules: Rules) -> Placed:
    """Differentiable once in ``scores`` and ``tau``; ``k`` is positive."""
    over = column(tau, scores)
    rows, number = (over, 1.0) if isinstance(over, Tensor) else (None, over)
    weight, place = torch.ops.khot.halving(scores, rows, number, k, *rules)
    return Placed(place, weight)


def _forward(scores: Tensor, tau: Tensor | None, tau_value: float, k: int, boost: float, power: bool) -> tuple[Tensor, Tensor]:
    leaves, weight = _bracket(scores, tau, tau_value, k, boost, power)
    places = torch.arange(k, dtype=torch.long, device=scores.device).unsqueeze(-1).expand_as(leaves)
    items = leaves.flatten(-2)
    place = torch.zeros(scores.shape, dtype=torch.long, device=scores.device).scatter(-1, items, places.flatten(-2))
    return torch.zeros(scores.shape, dtype=scores.dtype, device=scores.device).scatter_add(-1, items, weight.flatten(-2)), place


def _bracket(scores: Tensor, tau: Tensor | None, tau_value: float, k: int, boost: float, power: bool) -> Bracket:
    with torch.no_grad():
        return play(scores, k, tau_value if tau is None else tau.squeeze(-1), Rules(boost, power))


def _backward(
    grad: Tensor, scores: Tensor, tau: Tensor | None, tau_value: float, k: int, boost: float, power: bool
) -> tuple[Tensor, Tensor]:
    leaves = _bracket(scores, tau, tau_value, k, boost, power).leaves
    grad, over, rules = grad.gather(-1, leaves.flatten(-2)).view(leaves.shape), tau_value if tau is None else tau, Rules(boost, power)
    native = kernels.pick("tournament", scores, over, grad)
    if native is not None:
        return native.backward(grad, scores, leaves, over, *rules)
    scores, over = scores.detach().requires_grad_(), over if tau is None else tau.detach().requires_grad_()
    in_scores, in_tau = gradients(grad, scores, leaves, over, rules, (True, tau is not None))
    assert in_scores is not None
    rows = torch.zeros((*scores.shape[:-1], 1), dtype=torch.float64, device=scores.device) if in_tau is None else in_tau.to(torch.float64)
    return in_scores.contiguous(), rows.contiguous()


def _forward_fake(scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    weight = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    return weight, torch.empty(scores.shape, dtype=torch.long, device=scores.device)


def _backward_fake(grad: Tensor, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = torch.empty((*scores.shape[:-1], 1), dtype=torch.float64, device=scores.device)
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device), rows


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, tau, ctx.tau_value, *ctx.rules = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(scores, *(() if tau is None else (tau,)))


def _derivative(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    scores, *tau = ctx.saved_tensors
    in_scores, in_tau = torch.ops.khot.halving_backward(grad, scores, tau[0] if tau else None, ctx.tau_value, *ctx.rules)
    return in_scores, in_tau.to(tau[0].dtype) if tau else None, None, None, None, None


derive(define_rows(_FORWARD, _forward, _forward_fake), _derivative, _context)
define_rows(_BACKWARD, _backward, _backward_fake)
