r"""Entmax with an ``alpha`` of its own for every row, and the derivative in it.

For :math:`y_i = F_a((x_i - t)/\tau)` with :math:`\sum_i y_i = k`, a change of ``a`` acts on ``y`` as the change
:math:`-\tau\, \partial u / \partial a` of the scores does: the derivative in ``a`` follows from the one in the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import Number, in_forward_mode, is_recorded, nests, readable, wide_dtype, without_tangent, work_dtype
from khot.primitives.operators import define_rows, derive, leading
from khot.primitives.threshold.autograd import follow, gradients, in_argument, mask_and_shift, moves
from khot.primitives.threshold.tsallis import inverse_in_a, tsallis_family


def solve_per_row(scores: Tensor, k: Number, tau: Number, alpha: Tensor) -> Tensor:
    """``(..., n) -> (..., n)`` with columns ``k``, ``tau``, ``alpha``; differentiable in all of them, any number of times."""
    k, tau = (value if isinstance(value, Tensor) else torch.full_like(alpha, value) for value in (k, tau))
    if not scores.numel():
        return scores + 0 * (k + tau + alpha).to(scores.dtype)
    inputs = (scores.to(work_dtype(scores)), k, tau, alpha - 1)
    recorded = is_recorded() and not in_forward_mode()
    return (torch.ops.khot.entmax_per_row(*inputs) if recorded else _PerRow.apply(*inputs))[0].to(scores.dtype)


def _solve(scores: Tensor, k: Tensor, tau: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The mask and the thresholds: by the solver of a number where all rows have the same ``a``, else one family per row."""
    if readable(a) and a.numel() and bool((a == a.flatten()[0]).all()):
        return mask_and_shift(scores, k, tau, tsallis_family(float(a.flatten()[0])))
    from khot.primitives.threshold.bracket import solve_bracket  # read when it is first needed

    mask, shift = solve_bracket(scores, k.to(wide_dtype(scores)), tau, tsallis_family(a))
    return mask, shift


def _context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, _, tau, a = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, scores, tau, a)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    y, t, scores, tau, a = ctx.saved_tensors
    family = tsallis_family(a)
    grad_scores, grad_k, grad_tau = gradients(grad, y, scores, t, tau, family, True, True)[:3]
    grad_a = -(in_argument(grad, y, family)[0] * inverse_in_a(y, a)).sum(-1, keepdim=True)
    return grad_scores, grad_k, grad_tau, grad_a


class _PerRow(Function):
    """The same with a rule for forward mode, which dynamo refuses."""

    forward = staticmethod(_solve)
    backward = staticmethod(_backward)  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        _context(ctx, inputs, output)
        ctx.save_for_forward(*output, inputs[0], inputs[2], inputs[3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _PerRow.apply(*(leading(value, dim, info.batch_size) for value, dim in zip(inputs, in_dims, strict=True))), (0, 0)

    @staticmethod
    @nests
    def jvp(ctx: Any, d_scores: Tensor | None, d_k: Tensor | None, d_tau: Tensor | None, d_a: Tensor | None) -> tuple[Tensor, None]:
        y, t, scores, tau, a = map(without_tangent, ctx.saved_tensors)
        move = moves(y, d_scores, d_tau, scores, t, tau)
        if d_a is not None:
            move = move - d_a * inverse_in_a(y, a)
        return follow(y, move, d_k, tsallis_family(a)), None


def _fake(scores: Tensor, k: Tensor, tau: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores), scores.new_empty((*scores.shape[:-1], 1))


derive(define_rows("entmax_per_row(Tensor scores, Tensor k, Tensor tau, Tensor a) -> (Tensor, Tensor)", _solve, _fake), _backward, _context)
