r"""Elementwise functions between two parallel lines.

On an interval [l, u] a function is enclosed as :math:`\lambda x + \mu \pm \delta`. With the slope of the secant,
:math:`\lambda = (f(u) - f(l)) / (u - l)`, the offsets are the least and the largest :math:`g(x) = f(x) - \lambda x` on the interval.

For a convex f the largest g is at an end, and the least where :math:`f'(t) = \lambda`. As :math:`g(x) \ge g(t) + g'(t)(x - t)` for every t,
the lower line holds for any t once :math:`|g'(t)| (u - l)` is taken off: an inexact t costs tightness, never soundness.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot.bounds._rounding import EPS
from khot.bounds.domain import Band, Bound, Map

_BISECTIONS = 50
_SPARE = 1 + 64 * EPS  # functions of torch are good to a few units in the last place


def relu(x: Bound) -> Bound:
    """``max(x, 0)``: convex, with slope ``u / (u - l)`` where the interval holds 0."""
    return x.band(_convex(x.lower, x.upper, lambda v: v.clamp(min=0), lambda slope: torch.zeros_like(slope), None, increasing=True))


def exp(x: Bound) -> Bound:
    """``e^x``: convex; the tangent with the secant's slope touches at its logarithm."""
    return x.band(_convex(x.lower, x.upper, torch.exp, lambda slope: slope.clamp(min=1e-300).log(), torch.exp, increasing=True))


def reciprocal(x: Bound) -> Bound:
    """``1 / x`` for positive x: convex; the slope ``-1 / t^2`` is that of the secant at ``t = sqrt(l u)``."""
    _positive(x.lower, "reciprocal")
    return x.band(_convex(x.lower, x.upper, torch.reciprocal, lambda s: (-s).clamp(min=1e-300).rsqrt(), lambda v: -v.square().reciprocal(),
                          increasing=False))  # fmt: skip


def rsqrt(x: Bound) -> Bound:
    """``x^(-1/2)`` for positive x: convex; its slope is ``-t^(-3/2) / 2``."""
    _positive(x.lower, "rsqrt")
    return x.band(_convex(x.lower, x.upper, torch.rsqrt, lambda s: (-2 * s).clamp(min=1e-300) ** (-2 / 3), lambda v: -0.5 * v**-1.5,
                          increasing=False))  # fmt: skip


def gelu(x: Bound) -> Bound:
    r"""``x Phi(x)``, neither convex nor concave.

    Its slope :math:`\Phi(x) + x \varphi(x)` falls, rises and falls again, with turning points at :math:`\mp\sqrt 2`. So g has at most one
    stationary point in each of the three pieces, and bisection encloses it. Slopes lie between -.13 and 1.13, so that g moves by
    at most 2.3 times the width of the last bracket inside it.
    """
    low, high = x.lower, x.upper
    slope = _secant(low, high, _gelu, _gelu_slope)
    points = [low, high]
    for start, stop in ((-torch.inf, -math.sqrt(2)), (-math.sqrt(2), math.sqrt(2)), (math.sqrt(2), torch.inf)):
        found = _stationary(low.clamp(start, stop), high.clamp(start, stop), slope)
        points.append(torch.minimum(torch.maximum(found, low), high))  # a piece outside the interval counts as its end
    values = torch.stack([_gelu(p) - slope * p for p in points])
    size = torch.stack([_gelu(p).abs() + (slope * p).abs() for p in points]).amax(0)
    error = 64 * EPS * size + 2.3 * (high - low) * 2.0 ** (1 - _BISECTIONS)
    least, most = values.amin(0) - error, values.amax(0) + error
    # The function falls to its least value, -.1700 at -.7518, and rises from there; any other minimum is at an end.
    ends = torch.minimum(_gelu(low), _gelu(high))
    bottom = torch.where((low < -0.7517) & (high > -0.7519), -0.16998, ends)
    top = torch.maximum(_gelu(low), _gelu(high))
    return x.band(_band(slope, least, most, _down(bottom), _up(top)))


def _convex(
    low: Tensor, high: Tensor, f: Map, touch: Map, slope_at: Map | None, *, increasing: bool,
) -> Band:  # fmt: skip
    """The band of a convex monotone function; ``touch`` gives the point of a slope, ``slope_at`` the slope there (None: exact)."""
    at_low, at_high = f(low), f(high)
    slope = _secant(low, high, f, slope_at or (lambda v: (v > 0).to(v.dtype)))
    t = torch.minimum(torch.maximum(touch(slope), low), high)
    missed = torch.zeros_like(slope) if slope_at is None else (slope_at(t) - slope).abs() * (high - low)
    size = torch.maximum(at_low.abs(), at_high.abs()) + slope.abs() * torch.maximum(low.abs(), high.abs())
    most = torch.maximum(at_low - slope * low, at_high - slope * high) + 64 * EPS * size
    least = torch.minimum(f(t) - slope * t - missed, most) - 64 * EPS * size
    bottom, top = (at_low, at_high) if increasing else (at_high, at_low)
    return _band(slope, least, most, _down(bottom), _up(top))


def _secant(low: Tensor, high: Tensor, f: Map, slope_at: Map) -> Tensor:
    width = high - low
    narrow = width <= 1e-12 * (1 + high.abs())  # the difference of the values would be rounding
    slope = torch.where(narrow, slope_at(low), (f(high) - f(low)) / torch.where(narrow, 1.0, width))
    return slope.nan_to_num(0.0, 0.0, 0.0)


def _band(slope: Tensor, least: Tensor, most: Tensor, lower: Tensor, upper: Tensor) -> Band:
    return Band(slope, (least + most) / 2, (most - least) / 2 * _SPARE + EPS * (least.abs() + most.abs()), lower, upper)


def _stationary(low: Tensor, high: Tensor, slope: Tensor) -> Tensor:
    """Where the slope of gelu crosses ``slope`` between two ends on which it is monotone; an end if it does not."""
    rising = _gelu_slope(high) > _gelu_slope(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        left = (_gelu_slope(middle) < slope) == rising
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    return (low + high) / 2


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _down(value: Tensor) -> Tensor:
    return value - 16 * EPS * value.abs()


def _up(value: Tensor) -> Tensor:
    return value + 16 * EPS * value.abs()


def _positive(low: Tensor, name: str) -> None:
    if bool((low <= 0).any()):
        raise ValueError(f"{name} needs a positive lower bound, got {low.min().item():g}; meet the bound with what is known first")
