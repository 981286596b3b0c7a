r"""From inclusion probabilities to the logits of the maximum-entropy design that has them.

The logits maximise the concave :math:`g(\lambda) = \pi^\top \lambda - \log e_k(\exp \lambda)`, whose gradient is
:math:`\pi - \pi(\lambda)`. The classical fixed point :math:`\lambda \leftarrow \lambda + \operatorname{logit} \pi -
\operatorname{logit} \pi(\lambda)` (Chen, Dempster and Liu 1994) moves every coordinate uphill, as the two differences have the same
signs; where it is slow, a Newton step takes its place, uphill too. A step is halved until it gains enough, which makes the ascent of
a concave function converge from everywhere. The change of logits with the probabilities
is the inverse of the covariance, see :mod:`khot.primitives.covariance`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import in_transform, is_recorded, nests, readable, wide_dtype, without_tangent
from khot.primitives.covariance import in_front, solve_covariance
from khot.primitives.fixed_point import spread
from khot.primitives.operators import define, derive
from khot.primitives.poisson_binomial import marginals

MAX_ITERS = 200
_SHORTEST = 1e-8  # a step that was halved to this has met the limit of rounding
_FARTHEST = 8.0  # a Newton step in logits is cut here; far from the top the quadratic model knows little


def calibrate(probs: Tensor, k: Tensor | int) -> Tensor:
    """Logits ``(..., n)`` in float64 such that the marginals of their k-subset distribution are ``probs``.

    Differentiable any number of times, in directions that keep the sum; the common constant of the logits is not determined.

    Args:
        probs: ``(..., n)`` in [0, 1] with sum ``k`` up to rounding; 0 gives -inf, 1 gives +inf. Receives a gradient.
        k: a whole number, or ``(..., 1)`` whole numbers.

    Example:
        >>> probs = torch.tensor([0.2, 0.7, 0.8, 0.5, 0.4, 0.4])
        >>> marginals(calibrate(probs, 3), 3).probs.float()
        tensor([0.2000, 0.7000, 0.8000, 0.5000, 0.4000, 0.4000])
    """
    sizes = k if isinstance(k, Tensor) else torch.full((1,), k, dtype=torch.long, device=probs.device)
    if is_recorded() and not in_transform():
        return torch.ops.khot.calibrate(probs, sizes)
    return _Calibrate.apply(probs, sizes)


def _calibrated(probs: Tensor, k: Tensor) -> Tensor:
    k = k.expand(*probs.shape[:-1], 1)
    return _ascend(spread(probs.detach(), k), k)


class _Calibrate(Function):
    @staticmethod
    def forward(probs: Tensor, k: Tensor) -> Tensor:
        return _calibrated(probs, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, k = ctx.saved_tensors
        return solve_covariance(logits, k, grad).to(ctx.dtype), None

    @staticmethod
    @nests
    def jvp(ctx: Any, move: Tensor, _: None) -> Tensor:
        logits, k = map(without_tangent, ctx.saved_tensors)
        return solve_covariance(logits, k, move.to(logits.dtype))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], probs: Tensor, k: Tensor) -> tuple[Tensor, int]:
        return calibrate(*in_front(info, in_dims, probs, k)), 0


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
        if readable(done) and bool(done.all()):
            break
        way = step * seen.direction
        if not readable(newton) or bool(newton.any()):
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
    value = -reached.coins.surprise(probs, 1 - probs).unsqueeze(-1)
    return _Look(value, gradient.abs().amax(-1, keepdim=True), gradient, torch.where(free, target - reached.log_odds, 0.0))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """``sigmoid(a) - sigmoid(b)`` without cancellation: near 0 and 1 it is the relative error that moves a logit."""
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    return torch.sign(a - b) * torch.sigmoid(high) * torch.sigmoid(-low) * -torch.expm1(low - high)


def _newton(logits: Tensor, k: Tensor, gradient: Tensor) -> Tensor:
    way = solve_covariance(logits, k, gradient)
    return way * (_FARTHEST / way.abs().amax(-1, keepdim=True).clamp(min=_FARTHEST))


def _fake(probs: Tensor, k: Tensor) -> Tensor:
    return torch.empty_like(probs, dtype=wide_dtype(probs), memory_format=torch.contiguous_format)


derive(define("calibrate(Tensor probs, Tensor k) -> Tensor", _calibrated, _fake), _Calibrate.backward, _Calibrate.setup_context)
