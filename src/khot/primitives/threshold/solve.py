r"""Where to cut: the shift that makes a squashed row sum to k.

For an increasing squashing function :math:`F` from the reals to [0, 1], find :math:`t` such that

.. math:: \sum_i F((x_i - t) / \tau) = k .

The threshold is carried in two parts, :math:`u_i = (x_i - t) / \tau + s`, with ``t`` a number of the scores' own dtype.
Near the threshold ``x - t`` is then exact, so that the sum is right to rounding however large the scores are.

The search never asks the host for a value of a tensor: it runs a fixed number of rounds, and stops early only where looking is
free (ordinary CPU tensors). Each round is a Newton step kept inside a bracket; every other round, once a few have passed, bisects
the bracket in the order of floating-point numbers, which ends after as many rounds as the dtype has bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from khot._tensors import Number, readable, wide_dtype


class Squash(Protocol):
    """What the search needs to know of an increasing squashing function."""

    @property
    def f(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def inverse(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def slope(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def smooth(self) -> bool: ...


class Threshold(NamedTuple):
    """``u = (x - t) / tau + s``, both ``(..., 1)``."""

    t: Tensor
    s: Tensor


@dataclass(frozen=True)
class Rows:
    """The reductions over a row, each ``(..., n) -> (..., 1)``; a vector spread over processes brings its own."""

    sum: Callable[[Tensor], Tensor]
    amin: Callable[[Tensor], Tensor]
    amax: Callable[[Tensor], Tensor]
    local: bool = True  # the row is all here: a part of it may stand for it, and it may be taken piece by piece


def _wide_sum(values: Tensor) -> Tensor:
    """Sum in float64, where the device has it: n terms of rounding error would show in the sum otherwise.

    A long float32 row is first added up in runs of ``_RUN``, as a sum with another dtype copies its input on the CPU.
    """
    n = values.shape[-1]
    if values.dtype != torch.float32 or n < _RUN * _RUN:
        return values.sum(-1, keepdim=True, dtype=wide_dtype(values))
    even = n - n % _RUN
    runs = values[..., :even].unflatten(-1, (_RUN, -1)).sum(-2)
    rest = values[..., even:].sum(-1, keepdim=True, dtype=wide_dtype(values))
    return runs.sum(-1, keepdim=True, dtype=wide_dtype(values)) + rest


LOCAL = Rows(
    sum=_wide_sum,
    amin=lambda values: values.amin(-1, keepdim=True),
    amax=lambda values: values.amax(-1, keepdim=True),
)

_RUN = 32  # float32 numbers added before going on in float64
_LONG = 1 << 15  # rows from here on start from a sample of themselves
_STRIDE = 31  # prime, so that it does not beat with a power-of-two period in the scores
_CACHE = 1 << 18  # numbers in a piece whose temporaries stay in the cache (and cost no new pages)
_NEAR = 1.0  # a Newton step in u this small starts the fine search


def solve_shift(x: Tensor, k: Tensor, tau: Number, squash: Squash, *, rows: Rows = LOCAL, high: Tensor | None = None) -> Threshold:
    """The threshold of every row, without gradient, so near that one more Newton step, in the values themselves, makes it exact.

    Args:
        x: ``(..., n)`` scores; -inf takes no part, a nan makes its own row's threshold nan.
        k: ``(..., 1)``, how much the row shall sum to; at or below 0, and at or above the number of items that take part, the
            threshold is infinite.
        tau: temperature, a number or ``(..., 1)``.
        squash: the squashing function with its inverse and its slope as a function of its value.
        rows: the reductions over a row.
        high: the largest score of every row, where it is known.
    """
    low, high = rows.amin(x), rows.amax(x) if high is None else high
    if readable(low) and bool((low > -torch.inf).all()):
        size = torch.full_like(k, x.shape[-1]) if rows.local else rows.sum(torch.ones_like(x))
    else:
        size = rows.sum(x > -torch.inf)
        low = rows.amin(torch.where(x == -torch.inf, torch.inf, x))
    inside = (k > 0) & (k < size)
    target = torch.where(inside, k, size / 2)  # a row without an interior solution searches for something harmless
    share = (target / size).to(x.dtype).clamp(torch.finfo(x.dtype).tiny, 1 - torch.finfo(x.dtype).eps / 2)
    quantile = squash.inverse(share) * tau
    bracket = (_nudge(low - quantile, -1), _nudge(high - quantile, 1))
    start = _start(x, target, tau, squash, quantile, size, rows)
    t, s, done, bracket = _coarse(x, target, size, tau, squash, start, bracket, rows)
    if not _settled(done):
        s = _fine(x, target, size, tau, squash, t, s, bracket, rows)
    t = torch.where(inside, t, torch.where(k <= 0, torch.inf, -torch.inf))
    lost = torch.isnan(high) | torch.isnan(k) | torch.isnan(torch.as_tensor(tau, dtype=x.dtype, device=x.device))
    return Threshold(t.masked_fill(lost, torch.nan), s.masked_fill(~inside, 0.0))


def _start(x: Tensor, k: Tensor, tau: Number, squash: Squash, quantile: Tensor, size: Tensor, rows: Rows) -> Tensor:
    """A first guess: the threshold of a sample for long rows, that of a normal distribution for short ones."""
    if rows.local and x.shape[-1] >= _LONG:
        part = x[..., ::_STRIDE].contiguous()
        guess = solve_shift(part, k * (part.shape[-1] / x.shape[-1]), tau, squash, rows=rows)
        return guess.t - guess.s * tau
    mean = (rows.sum(x) / size).to(x.dtype)
    spread = (rows.sum((x - mean).square()) / size).to(x.dtype).sqrt()
    centre = squash.inverse(torch.full_like(quantile, 0.5)) * tau
    return mean - centre - (quantile - centre) * (1 + (0.63 * spread / tau).square()).sqrt()


def _coarse(
    x: Tensor, k: Tensor, size: Tensor, tau: Number, squash: Squash, t: Tensor, bracket: tuple[Tensor, Tensor], rows: Rows
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Bring ``t`` so near that one Newton step is smaller than ``_NEAR``, or the bracket to two neighbouring numbers.

    Returns ``t``, the step, whether it is so small that it needs no polish, and the bracket.
    """
    low, high = bracket
    slope_low, slope_high = torch.zeros_like(t), torch.zeros_like(t)
    t = torch.where((t > low) & (t < high), t, _middle(low, high))
    parts = pieces(x, rows)
    step, done = torch.zeros_like(t), torch.zeros_like(t, dtype=torch.bool)
    found = done
    for i in range(2 * 8 * x.element_size() + 8):
        excess, slope, newton = _excess(parts, k, size, t, 0.0, tau, squash, rows)
        above = (excess > 0) & ~done
        below = (excess <= 0) & ~done
        low, slope_low = torch.where(above, t, low), torch.where(above, slope, slope_low)
        high, slope_high = torch.where(below, t, high), torch.where(below, slope, slope_high)
        near = ((newton.abs() <= _NEAR) | (excess == 0)) & ~done
        step, found = torch.where(near, -newton.nan_to_num(0.0, 0.0, 0.0), step), found | near
        middle = _middle(low, high)
        closed = ((middle <= low) | (middle >= high)) & ~done & ~near
        # Of two neighbouring numbers, the one with the steeper sum sits on data.
        leap = t + newton * tau
        wild = ~((leap > low) & (leap < high))
        fresh = torch.where(wild | (i >= 4 and i % 2 == 0), middle, leap)
        fresh = torch.where(closed, torch.where(slope_low > slope_high, low, high), fresh)
        t = torch.where(done | near, t, fresh)
        done = done | near | closed
        if _settled(done):
            break
    return t, step, found & (step.abs() <= _enough(x, squash)), (low, high)


def _enough(x: Tensor, squash: Squash) -> float:
    """How small a Newton step must be: the error after it is about its square, and the step in the values squares that once more."""
    eps = torch.finfo(x.dtype).eps
    return 0.5 * eps**0.25 if squash.smooth else 2 * eps


def _fine(
    x: Tensor, k: Tensor, size: Tensor, tau: Number, squash: Squash, t: Tensor, s: Tensor, bracket: tuple[Tensor, Tensor], rows: Rows
) -> Tensor:
    """Polish the second part of the threshold by Newton steps that stay inside the bracket."""
    eps = torch.finfo(x.dtype).eps
    enough = _enough(x, squash)
    far = 800.0  # beyond the range of exp
    low, high = ((t - bracket[1]) / tau).clamp(-far, far), ((t - bracket[0]) / tau).clamp(-far, far)
    parts = pieces(x, rows)
    done = torch.zeros_like(s, dtype=torch.bool)
    for i in range(4 + 8 * x.element_size()):
        excess, slope, step = _excess(parts, k, size, t, s, tau, squash, rows)
        high, low = torch.where(excess > 0, s, high), torch.where(excess > 0, low, s)
        newton, middle = s - step, (low + high) / 2
        still = (step.abs() <= enough) | (excess.abs() <= eps * k)
        wild = ~((newton >= low) & (newton <= high)) | (i >= 6 and i % 2 == 0)
        fresh = torch.where(wild & ~still, middle, newton.nan_to_num(0.0))
        s = torch.where(done | (slope == 0) & still, s, fresh)
        done = done | still | (middle <= low) | (middle >= high)
        if _settled(done):
            break
    return s


def _excess(
    parts: tuple[Tensor, ...], k: Tensor, size: Tensor, t: Tensor, s: Number, tau: Number, squash: Squash, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """By how much the squashed row sums to more than ``k``, how fast that grows with ``s``, and the step back."""
    total, slope = -k, torch.zeros_like(k)
    for part in parts:
        y = squash.f(argument(part, t, s, tau))
        total, slope = total + rows.sum(y), slope + rows.sum(squash.slope(y))
    step = total / slope
    if squash.smooth:
        # Newton's step on the logit of the mean, which is nearly straight: in the tails the sum grows like exp(s).
        gap = torch.log1p(total / k) - torch.log1p(-total / (size - k))
        straight = gap * (k + total) * (size - k - total) / (size * slope)
        step = torch.where(straight.isfinite(), straight, step)
    return total.to(t.dtype), slope.to(t.dtype), step.to(t.dtype)


def argument(x: Tensor, t: Tensor, s: Number, tau: Number) -> Tensor:
    """``(x - t) / tau + s`` in one buffer."""
    u = x - t
    if isinstance(tau, Tensor) or tau != 1:
        u = u.div_(tau)
    return u.add_(s) if isinstance(s, Tensor) or s != 0 else u


def pieces(x: Tensor, rows: Rows = LOCAL) -> tuple[Tensor, ...]:
    """A long row in parts that fit the cache, where Python's loop over them costs less than the memory traffic."""
    if not rows.local or not readable(x) or x.numel() <= 2 * _CACHE:
        return (x,)
    return x.split(max(_CACHE * x.shape[-1] // x.numel(), 512), dim=-1)


def _settled(done: Tensor) -> bool:
    return readable(done) and bool(done.all())


_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def _middle(low: Tensor, high: Tensor) -> Tensor:
    """The number half-way between in the order of floating-point numbers."""
    a, b = _rank(low), _rank(high)
    middle = (a & b) + ((a ^ b) >> 1)  # the mean without overflow
    return _unrank(middle, low.dtype)


def _nudge(value: Tensor, by: int) -> Tensor:
    """A few numbers further down or up, for the rounding in the ends of the bracket."""
    limit = torch.finfo(value.dtype).max
    return _unrank(_rank(value.clamp(-limit, limit)) + 16 * by, value.dtype).nan_to_num(0.0, limit, -limit)


def _rank(value: Tensor) -> Tensor:
    bits = value.contiguous().view(_INTEGER[value.dtype])
    return torch.where(bits < 0, torch.iinfo(bits.dtype).min - bits, bits)


def _unrank(rank: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(rank < 0, torch.iinfo(rank.dtype).min - rank, rank).view(dtype)
