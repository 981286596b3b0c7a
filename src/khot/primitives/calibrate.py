r"""From inclusion probabilities to the logits of the maximum-entropy design that has them.

The logits maximise the concave :math:`g(\lambda) = \pi^\top \lambda - \log e_k(\exp \lambda)`, whose gradient is
:math:`\pi - \pi(\lambda)`. The classical fixed point :math:`\lambda \leftarrow \lambda + \operatorname{logit} \pi -
\operatorname{logit} \pi(\lambda)` (Chen, Dempster and Liu 1994) moves every coordinate uphill, as the two differences have the same
signs; where it is slow, a Newton step takes its place, uphill too. A step is halved until it gains enough, which makes the ascent of
a concave function converge from everywhere. The change of logits with the probabilities
is the inverse of the covariance, applied by conjugate gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from khot.primitives.fixed_point import spread
from khot.primitives.poisson_binomial import marginals

MAX_ITERS = 200
_TINY = torch.finfo(torch.float64).tiny
_SHORTEST = 1e-8  # a step that was halved to this has met the limit of rounding
_FARTHEST = 8.0  # a Newton step in logits is cut here; far from the top the quadratic model knows little


def calibrate(probs: Tensor, k: Tensor) -> Tensor:
    """Logits ``(..., n)`` in float64 such that the marginals of their k-subset distribution are ``probs``.

    Args:
        probs: ``(..., n)`` in [0, 1] with sum ``k`` up to rounding; 0 gives -inf, 1 gives +inf. Receives a gradient.
        k: ``(..., 1)`` whole numbers.

    Example:
        >>> probs = torch.tensor([0.2, 0.7, 0.8, 0.5, 0.4, 0.4])
        >>> marginals(calibrate(probs, torch.tensor([3])), torch.tensor([3])).probs.float()
        tensor([0.2000, 0.7000, 0.8000, 0.5000, 0.4000, 0.4000])
    """
    return _Calibrate.apply(probs, k)


class _Calibrate(Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, k: Tensor) -> Tensor:
        logits = _ascend(spread(probs, k), k)
        ctx.save_for_backward(logits, k)
        ctx.dtype = probs.dtype
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, k = ctx.saved_tensors
        return _solve_covariance(logits, k, grad).to(ctx.dtype), None


class _Look(NamedTuple):
    """What is seen from a point, ``(..., 1)`` each: the objective and the largest error; ``(..., n)``: the gradient and a way up."""

    value: Tensor
    error: Tensor
    gradient: Tensor
    direction: Tensor


def _ascend(probs: Tensor, k: Tensor) -> Tensor:
    target = torch.logit(probs)  # infinite at 0 and 1, where nothing is to be found
    look = partial(_look, target=target, probs=probs, free=target.isfinite(), k=k)
    here = _start(probs, target)
    seen = look(here)
    step = torch.ones_like(seen.error)
    newton = torch.zeros_like(seen.error, dtype=torch.bool)
    for _ in range(MAX_ITERS):
        done = (seen.error <= 8 * torch.finfo(probs.dtype).eps) | (step < _SHORTEST)
        if bool(done.all()):
            break
        way = step * seen.direction
        if bool(newton.any()):
            way = torch.where(newton, _newton(here, k, torch.where(done, 0.0, seen.gradient)), way)
        there = torch.where(target.isfinite(), here + way, target)
        new = look(there)
        gain = 1e-4 * (seen.gradient * way).sum(-1, keepdim=True)
        # Close to the top the gain drowns in rounding; there a smaller error is what tells.
        better = ((new.value > seen.value + gain) | (new.error <= 0.9 * seen.error)) & ~done
        step = torch.where(newton, step, torch.where(better, (2 * step).clamp(max=1.0), step / 2))
        newton = better & (new.error > 0.25 * seen.error)
        here = torch.where(better, there, here)
        seen = _Look(*(torch.where(better, a, b) for a, b in zip(new, seen, strict=True)))
    return here


def _start(probs: Tensor, target: Tensor) -> Tensor:
    """The logits if the number of heads among the others were normal; below a variance of 1/2 it is not."""
    variance = probs * (1 - probs)
    return target - (probs - 0.5) / (variance.sum(-1, keepdim=True) - variance).clamp(min=0.5)


def _look(logits: Tensor, *, target: Tensor, probs: Tensor, free: Tensor, k: Tensor) -> _Look:
    reached = marginals(logits, k)
    gradient = torch.where(free, _difference(target, reached.log_odds), 0.0)
    value = torch.where(free, probs * logits, 0.0).sum(-1, keepdim=True) - reached.log_total.unsqueeze(-1)
    return _Look(value, gradient.abs().amax(-1, keepdim=True), gradient, torch.where(free, target - reached.log_odds, 0.0))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """``sigmoid(a) - sigmoid(b)`` without cancellation: near 0 and 1 it is the relative error that moves a logit."""
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    return torch.sign(a - b) * torch.sigmoid(high) * torch.sigmoid(-low) * -torch.expm1(low - high)


def _newton(logits: Tensor, k: Tensor, gradient: Tensor) -> Tensor:
    way = _solve_covariance(logits, k, gradient)
    return way * (_FARTHEST / way.abs().amax(-1, keepdim=True).clamp(min=_FARTHEST))


def _solve_covariance(logits: Tensor, k: Tensor, grad: Tensor) -> Tensor:
    """Conjugate gradients for ``Cov x = grad``, preconditioned by the variances, in the space of free items."""
    free = logits.isfinite()
    with torch.enable_grad():
        point = logits.detach().requires_grad_()
        mean = marginals(point, k).probs
    variance = torch.where(free, (mean * (1 - mean)).detach().clamp(min=_TINY), 1.0)

    def covariance(x: Tensor) -> Tensor:
        return torch.where(free, torch.autograd.grad(mean, point, x, retain_graph=True)[0], 0.0)

    # The covariance is blind to a common shift of the logits, so that part of the gradient must not be asked for.
    grad = torch.where(free, grad, 0.0)
    share = torch.where(free, variance, 0.0) / torch.where(free, variance, 0.0).sum(-1, keepdim=True).clamp(min=_TINY)
    residual = grad - share * grad.sum(-1, keepdim=True)
    x = torch.zeros_like(residual)
    scaled = residual / variance
    direction, energy = scaled, (residual * scaled).sum(-1, keepdim=True)
    first = energy
    for _ in range(min(logits.shape[-1], 200)):
        if bool((energy <= 1e-28 * first).all()):
            break
        image = covariance(direction)
        length = (energy / (direction * image).sum(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
        x, residual = x + length * direction, residual - length * image
        scaled = residual / variance
        fresh = (residual * scaled).sum(-1, keepdim=True)
        direction, energy = scaled + (fresh / energy).nan_to_num(0.0, 0.0, 0.0) * direction, fresh
    return x
