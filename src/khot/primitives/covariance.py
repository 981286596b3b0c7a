r"""Systems with the covariance of a k-subset distribution, without the n x n matrix.

The covariance :math:`C(\lambda)` is the derivative of the marginals in the logits, so that it is applied by differentiating them, and
inverted by conjugate gradients. It does not see a common shift of the logits: the right-hand side is projected to the sum 0, and of all
solutions x the one with :math:`\sum_i \pi_i (1 - \pi_i) x_i = 0` is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import in_transform, is_recorded, nests, readable, without_tangent
from khot.primitives.operators import define
from khot.primitives.poisson_binomial import marginals

_TINY = torch.finfo(torch.float64).tiny


def solve_covariance(logits: Tensor, k: Tensor, target: Tensor) -> Tensor:
    """``x`` with ``Cov x = target`` in the space of free items, ``(..., n)`` in float64.

    Differentiable any number of times where ``target`` sums to 0, up to a common constant of ``x``.

    Args:
        logits: ``(..., n)`` in float64.
        k: ``(..., 1)`` whole numbers.
        target: ``(..., n)`` in float64.

    Example:
        >>> x = solve_covariance(torch.zeros(3).double(), torch.tensor([1]), torch.tensor([1.0, -1.0, 0.0]).double())
        >>> x.float()  # the covariance is (I - 1/3) / 3
        tensor([ 3., -3.,  0.])
    """
    if is_recorded() and not in_transform():
        return torch.ops.khot.solve_covariance(logits, k, target)
    return _Solve.apply(logits, k, target)


class _Solve(Function):
    @staticmethod
    def forward(logits: Tensor, k: Tensor, target: Tensor) -> Tensor:
        return _conjugate_gradients(logits, k, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.save_for_forward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, k, x = ctx.saved_tensors
        way = solve_covariance(logits, k, grad)
        return -_bend(logits, k, way, x) if ctx.needs_input_grad[0] else None, None, way

    @staticmethod
    @nests
    def jvp(ctx: Any, move: Tensor | None, _: None, move_target: Tensor | None) -> Tensor:
        logits, k, x = map(without_tangent, ctx.saved_tensors)
        target = torch.zeros_like(x) if move_target is None else move_target
        return solve_covariance(logits, k, target if move is None else target - _bend(logits, k, move, x))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], logits: Tensor, k: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return solve_covariance(*in_front(info, in_dims, logits, k, target)), 0


def in_front(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """The batch as one more leading dimension of rows, of all tensors."""
    pairs = zip(tensors, in_dims, strict=True)
    moved = [x.expand(info.batch_size, *x.shape).contiguous() if dim is None else x.movedim(dim, 0) for x, dim in pairs]
    most = max(x.ndim for x in moved)
    return [x.reshape(x.shape[0], *[1] * (most - x.ndim), *x.shape[1:]) for x in moved]


def _bend(logits: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The derivative of ``Cov b`` along ``a``: the third cumulants, contracted with both; symmetric in them."""
    free = logits.isfinite()
    a, b = torch.where(free, a, 0.0), torch.where(free, b, 0.0)
    logits = logits.clone()  # a dual tensor cannot be made of an expanded one

    def covariance(point: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: marginals(x, k).probs, (point,), (b,))[1]

    return torch.where(free, torch.func.jvp(covariance, (logits,), (a,))[1], 0.0)


def _conjugate_gradients(logits: Tensor, k: Tensor, target: Tensor) -> Tensor:
    """Preconditioned by the variances."""
    free = logits.isfinite()
    with torch.inference_mode(False), torch.enable_grad():
        point = logits.detach().clone().requires_grad_()
        mean = marginals(point, k.clone()).probs
    spread = (mean * (1 - mean)).detach()
    variance = torch.where(free, spread.clamp(min=_TINY), 1.0)

    def covariance(x: Tensor) -> Tensor:
        return torch.where(free, torch.autograd.grad(mean, point, x, retain_graph=True)[0], 0.0)

    residual = _project(torch.where(free, target, 0.0), torch.where(free, variance, 0.0))
    x = torch.zeros_like(residual)
    scaled = residual / variance
    direction, energy = scaled, (residual * scaled).sum(-1, keepdim=True)
    first = energy
    for _ in range(min(logits.shape[-1], 200)):
        if readable(energy) and bool((energy <= 1e-28 * first).all()):
            break
        image = covariance(direction)
        length = (energy / (direction * image).sum(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
        x, residual = x + length * direction, residual - length * image
        scaled = residual / variance
        fresh = (residual * scaled).sum(-1, keepdim=True)
        direction, energy = scaled + (fresh / energy).nan_to_num(0.0, 0.0, 0.0) * direction, fresh
    return x


def _project(target: Tensor, variance: Tensor) -> Tensor:
    """The part of ``target`` that sums to 0: of the rest, every item gives its share of the variance."""
    return target - variance / variance.sum(-1, keepdim=True).clamp(min=_TINY) * target.sum(-1, keepdim=True)


def _fake(logits: Tensor, k: Tensor, target: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


define("solve_covariance(Tensor logits, Tensor k, Tensor target) -> Tensor", _conjugate_gradients, _fake)
