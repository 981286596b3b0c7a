r"""The search for ordinary rows that are spread over places: Newton steps from a good start, one reduction each, and a test of the result.

It reads values, as it waits for the other places in any case. Rows that fail the test go to the search with a bracket.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, wide_dtype
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.rows import Rows
from khot.primitives.threshold.start import guess

_ROUNDS = 8  # rows that need more are better served by the bracket, as are
_FEW = 16  # one in so many that holds up the others


class Tried(NamedTuple):
    """Mask, threshold in the scores' own place, and which rows passed the test."""

    mask: Tensor
    shift: Tensor
    passed: Tensor


def try_newton(x: Tensor, k: Number, tau: Number, family: Family, rows: Rows) -> Tried:
    """The mask and the threshold of rows without surprises.

    Args:
        x: ``(..., n)`` scores whose values can be read.
        k: a number, or ``(..., 1)`` in float64.
        tau: temperature, a number or ``(..., 1)``.
        family: the squashing function.
        rows: the reductions over a row.
    """
    length = rows.known_length(x)
    size = rows.size(x) if length is None else float(length)
    t = guess(x, k, size, tau, family, rows)
    search = _on_curves if family.smooth else _on_corners
    t, s, settled, sums = search(x, k, size, t, tau, family, rows)
    mask, step, total = _finish(x, k, t, s, tau, family, rows, sums)
    eps = torch.finfo(x.dtype).eps
    # The error that a last step leaves is its square. Without a continuous slope, only a step without size crosses no corner.
    small = eps**0.5 if family.smooth else 4 * eps
    still = step.abs() <= small if sums is None else step.abs() <= small + _blur(*sums)
    passed = settled & still & ((total - k).abs() <= k * (eps * (rows.places + _roundings(x, size))))
    return Tried(mask, t - (step if s is None else step + s) * tau, passed)


def argument(x: Tensor, t: Tensor, s: Tensor | None, tau: Number) -> Tensor:
    """``(x - t) / tau + s`` in one buffer."""
    u = x - t
    if isinstance(tau, Tensor) or tau != 1:
        u = u.div_(tau)
    return u if s is None else u.add_(s)


def _native(rows: Rows, family: Family, x: Tensor, t: Tensor, tau: Number) -> Any:
    """The native passes for rows of which only a part is here. What is all here has a native solver of its own."""
    return None if rows.local else kernels.pick("shard", family.name, x, t, tau)


def _sums(x: Tensor, t: Tensor, s: Tensor | None, tau: Number, family: Family, rows: Rows) -> tuple[Tensor, Tensor]:
    """What the squashed row sums to, and its slopes."""
    native = _native(rows, family, x, t, tau)
    if native is not None:
        total, slope = rows.across(*native.measure(x, t, s, tau, family.name))
        return (total.to(x.dtype), slope.to(x.dtype)) if family.smooth else (total, slope)
    u = argument(x, t, s, tau)
    y = family.f(u)
    total, slope = (rows.rough if family.smooth else rows.sums)(y, family.slope_at(u, y))  # a corner is found by the last digit
    return total, slope


def _on_curves(x: Tensor, k: Number, size: Number, t: Tensor, tau: Number, family: Family, rows: Rows) -> tuple[Tensor, None, Tensor, None]:
    """Newton steps on the logit of the mean, which is nearly straight: in the tails the sum grows like exp(t)."""
    # The error after a step is about its square, and the step in the values squares that once more.
    enough = 0.5 * torch.finfo(t.dtype).eps ** 0.25
    odds = k / (size - k) if isinstance(k, Tensor) or isinstance(size, Tensor) or k < size else math.nan
    step = torch.full_like(t, torch.inf)
    for i in range(_ROUNDS):
        total, slope = _sums(x, t, None, tau, family, rows)
        rest = size - total
        step = (rest / total).mul_(odds).log_().mul_(total).mul_(rest).div_(slope).div_(size)
        t = (t - step * tau).to(t.dtype)
        largest = float(step.abs().max())
        if largest <= enough or i >= 2 and _nearly_all(step.abs() <= enough):
            break
    return t, None, step.abs() <= enough, None


def _on_corners(
    x: Tensor, k: Number, size: Number, t: Tensor, tau: Number, family: Family, rows: Rows
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Newton steps that stay between the points already seen, as the slope says little beyond the next corner.

    The last result is the sum and the slope at the point returned, so that they need not be taken again.
    """
    enough = 4 * torch.finfo(t.dtype).eps
    low, high = torch.full_like(t, -torch.inf), torch.full_like(t, torch.inf)
    s, settled = torch.zeros_like(t), torch.zeros_like(t, dtype=torch.bool)
    total = slope = t
    for i in range(_ROUNDS):
        total, slope = _sums(x, t, s, tau, family, rows)
        over = total > k
        low, high = torch.where(over, t, low), torch.where(over, high, t)
        missing, rest = k - total, size - total
        # Far away the logit of the mean is straighter than the sum.
        far = (k * rest / (total * (size - k))).log_().mul_(total).mul_(rest).div_(size)
        step = torch.where(missing.abs() * 10 < torch.minimum(total, rest), missing, far) / slope
        there = (t - (step + s) * tau).to(t.dtype)
        sound = (there >= low) & (there <= high)
        settled = sound & (step.abs() <= enough + _blur(total, slope))
        if i == _ROUNDS - 1 or _nearly_all(settled):
            break
        # What rounding took from the step to the next threshold stays in s.
        s = torch.where(sound, step + s - (t.to(step.dtype) - there) / tau, 0.0).to(t.dtype)
        t = torch.where(sound, there, (low + high) / 2)
    return t, s, settled, (total, slope)


def _blur(total: Tensor, slope: Tensor) -> Tensor:
    """The part of a step that rounding of the sum makes: in float64 it cannot be summed any better."""
    return 2 * torch.finfo(total.dtype).eps * total / slope


def _roundings(x: Tensor, size: Number) -> Number:
    """How often a sum of a row in its own dtype rounds, added up in pairs; nothing where a wider dtype takes the sum."""
    if x.dtype != wide_dtype(x):
        return 0
    return size.log2() if isinstance(size, Tensor) else math.log2(max(size, 1.0))


def _nearly_all(settled: Tensor) -> bool:
    return int(settled.sum()) * _FEW >= (_FEW - 1) * settled.numel()


def _finish(
    x: Tensor,
    k: Number,
    t: Tensor,
    s: Tensor | None,
    tau: Number,
    family: Family,
    rows: Rows,
    known: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mask with a last Newton step in the values themselves, that step, and what the mask sums to.

    ``known`` is what the squashed row sums to and its slopes, where the search has them already.
    """
    native = _native(rows, family, x, t, tau)
    if native is not None:
        total, slope = known or rows.across(*native.measure(x, t, s, tau, family.name))
        step = ((k - total) / slope).to(t.dtype)
        y, total = native.mask(x, t, step if s is None else step + s, tau, family.name)
        return y, step, rows.across(total)[0]
    u = argument(x, t, s, tau)
    y = family.f(u)
    v = family.slope_at(u, y)
    total, slope = known or rows.sums(y, v)
    step = ((k - total) / slope).to(t.dtype)
    y = y.addcmul_(v, step).clamp_(0, 1)
    return y, step, rows.sums(y)[0]
