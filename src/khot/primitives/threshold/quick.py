r"""The search for ordinary rows: Newton steps from a good start, and a test of what came out.

It reads values, so that it runs where that is free (ordinary CPU tensors). Rows that fail the test go to the search with a bracket.
Python's share in the time of a small call is a call into torch each: hence numbers stay numbers, and what a row does not need is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, wide_dtype
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.rows import Rows, pieces

_ROUNDS = 8  # rows that need more are better served by the bracket, as are
_FEW = 16  # one in so many that holds up the others
_PROBIT = math.pi / 8  # a logistic function averaged over a normal law of variance v is one stretched by sqrt(1 + pi v / 8) (MacKay)
_WIDE = 2  # how many times the variance of the noise the scores must have, so that its tails do not show
_NODES = 512
_noises: dict[tuple[str, float], float] = {}


class Tried(NamedTuple):
    """Mask, threshold in the scores' own place, and which rows passed the test."""

    mask: Tensor
    shift: Tensor
    passed: Tensor


def try_newton(x: Tensor, k: Number, tau: Number, family: Family, rows: Rows, start: Tensor | None = None) -> Tried:
    """The mask and the threshold of rows without surprises.

    Args:
        x: ``(..., n)`` scores whose values can be read.
        k: a number, or ``(..., 1)`` in float64.
        tau: temperature, a number or ``(..., 1)``.
        family: the squashing function.
        rows: the reductions over a row.
        start: where to begin, ``(..., 1)``; by default where a normal law with the row's mean and deviation has its threshold.
    """
    length = rows.known_length(x)
    size = rows.size(x) if length is None else float(length)
    t = guess(x, k, size, tau, family, rows) if start is None else start
    parts = pieces(x, rows)
    search = _on_curves if family.smooth else _on_corners
    t, s, settled, sums = search(parts, k, size, t, tau, family, rows)
    mask, step, total = _finish(parts, k, t, s, tau, family, rows, sums)
    eps = torch.finfo(x.dtype).eps
    # The error that a last step leaves is its square. Without a continuous slope, only a step without size crosses no corner.
    small = eps**0.5 if family.smooth else 4 * eps
    still = step.abs() <= small if sums is None else step.abs() <= small + _blur(*sums)
    passed = settled & still & ((total - k).abs() <= k * (eps * (rows.places + _roundings(x, size))))
    return Tried(mask, t - (step if s is None else step + s) * tau, passed)


def guess(x: Tensor, k: Number, size: Number, tau: Number, family: Family, rows: Rows) -> Tensor:
    """The threshold of a normal law with the mean and the variance of the row; items at -inf are left out.

    ``F`` is the law of a noise: its sum counts how many scores with noise lie above the threshold. Where the scores are wider than
    the noise, or the noise has no exponential tails, both together are nearly normal. Else the noise's own quantile is stretched.
    """
    mean, variance, size = (_moments if rows.local else _moments_at_once)(x, size, rows)
    share = k / size
    centre = _inverse(family.inverse, 0.5, x)
    spread = variance.sqrt_()
    ratio = (spread / tau).square_()  # tau squared may overflow
    both = ratio.add(_noise(family)).sqrt_() * _inverse(_normal_quantile, share, x)
    if family.smooth:
        reach = _inverse(family.inverse, share, x) - centre
        both = torch.where(ratio > _WIDE * _noise(family), both, (ratio * _PROBIT).add_(1).sqrt_() * reach)
    return (mean - centre * tau - both * tau).to(x.dtype)


def _normal_quantile(share: Tensor) -> Tensor:
    return torch.special.ndtri(share.double()).to(share.dtype)


def _noise(family: Family) -> float:
    """The variance of the law whose distribution function is ``F``, to a few digits."""
    key = family.name, family.alpha
    if key not in _noises:
        shares = (torch.arange(_NODES, dtype=torch.float64, device="cpu") + 0.5) / _NODES
        _noises[key] = float(family.inverse(shares).var(correction=0))
    return _noises[key]


def _moments(x: Tensor, size: Number, rows: Rows) -> tuple[Tensor, Tensor, Number]:
    """Mean and variance of the items that take part, and how many those are."""
    (total,) = rows.rough(x)
    if not math.isfinite(float(total.sum())):
        total, size = rows.rough(x.nan_to_num(0.0, torch.nan, 0.0), (x > -torch.inf).to(x.dtype))
    mean = total / size
    away = x - mean
    (square,) = rows.rough((away if isinstance(size, float) else away.nan_to_num_(0.0, 0.0, 0.0)).square_())
    return mean, square / size, size


def _moments_at_once(x: Tensor, size: Number, rows: Rows) -> tuple[Tensor, Tensor, Number]:
    """:func:`_moments` by one reduction. The variance loses the digits that mean and squares share, which a start can do without."""
    native = kernels.pick("shard", "sigmoid", x)
    if native is not None:
        total, square = rows.across(*native.moments(x))
    else:
        wide = x.to(wide_dtype(x))
        total, square = rows.sums(wide, wide * wide)
    if not math.isfinite(float(total.sum() + square.sum())):
        wide = x.to(wide_dtype(x)).nan_to_num(0.0, torch.nan, 0.0)
        total, square, size = rows.sums(wide, wide * wide, x > -torch.inf)
    mean = total / size
    return mean.to(x.dtype), (square / size - mean * mean).clamp_(min=0.0).to(x.dtype), size


def _inverse(inverse: Callable[[Tensor], Tensor], share: Number, x: Tensor) -> Number:
    if isinstance(share, Tensor):
        return inverse(share).to(x.dtype)
    return float(inverse(torch.tensor(share, dtype=torch.float64, device="cpu")))


def argument(x: Tensor, t: Tensor, s: Tensor | None, tau: Number) -> Tensor:
    """``(x - t) / tau + s`` in one buffer."""
    u = x - t
    if isinstance(tau, Tensor) or tau != 1:
        u = u.div_(tau)
    return u if s is None else u.add_(s)


def _native(rows: Rows, family: Family, x: Tensor, t: Tensor, tau: Number) -> Any:
    """The native passes for rows of which only a part is here. What is all here has a native solver of its own."""
    return None if rows.local else kernels.pick("shard", family.name, x, t, tau)


def _sums(parts: tuple[Tensor, ...], t: Tensor, s: Tensor | None, tau: Number, family: Family, rows: Rows) -> tuple[Tensor, Tensor]:
    """What the squashed row sums to, and its slopes."""
    found = [_sums_of(part, t, s, tau, family, rows) for part in parts]
    return found[0] if len(found) == 1 else (torch.stack([a for a, _ in found]).sum(0), torch.stack([b for _, b in found]).sum(0))


def _sums_of(x: Tensor, t: Tensor, s: Tensor | None, tau: Number, family: Family, rows: Rows) -> tuple[Tensor, Tensor]:
    native = _native(rows, family, x, t, tau)
    if native is not None:
        total, slope = rows.across(*native.measure(x, t, s, tau, family.name))
        return (total.to(x.dtype), slope.to(x.dtype)) if family.smooth else (total, slope)
    u = argument(x, t, s, tau)
    y = family.f(u)
    total, slope = (rows.rough if family.smooth else rows.sums)(y, family.slope_at(u, y))  # a corner is found by the last digit
    return total, slope


def _on_curves(
    parts: tuple[Tensor, ...], k: Number, size: Number, t: Tensor, tau: Number, family: Family, rows: Rows
) -> tuple[Tensor, None, Tensor, None]:
    """Newton steps on the logit of the mean, which is nearly straight: in the tails the sum grows like exp(t)."""
    # The error after a step is about its square, and the step in the values squares that once more.
    enough = 0.5 * torch.finfo(t.dtype).eps ** 0.25
    odds = k / (size - k) if isinstance(k, Tensor) or isinstance(size, Tensor) or k < size else math.nan
    step = torch.full_like(t, torch.inf)
    for i in range(_ROUNDS):
        total, slope = _sums(parts, t, None, tau, family, rows)
        rest = size - total
        step = (rest / total).mul_(odds).log_().mul_(total).mul_(rest).div_(slope).div_(size)
        t = (t - step * tau).to(t.dtype)
        largest = float(step.abs().max())
        if largest <= enough or i >= 2 and _nearly_all(step.abs() <= enough):
            break
    return t, None, step.abs() <= enough, None


def _on_corners(
    parts: tuple[Tensor, ...], k: Number, size: Number, t: Tensor, tau: Number, family: Family, rows: Rows
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Newton steps that stay between the points already seen, as the slope says little beyond the next corner.

    The last result is the sum and the slope at the point returned, so that they need not be taken again.
    """
    enough = 4 * torch.finfo(t.dtype).eps
    low, high = torch.full_like(t, -torch.inf), torch.full_like(t, torch.inf)
    s, settled = torch.zeros_like(t), torch.zeros_like(t, dtype=torch.bool)
    total = slope = t
    for i in range(_ROUNDS):
        total, slope = _sums(parts, t, s, tau, family, rows)
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
    parts: tuple[Tensor, ...],
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
    native = _native(rows, family, parts[0], t, tau)
    if native is not None:
        (x,) = parts  # a row that is not all here is not cut into pieces
        total, slope = known or rows.across(*native.measure(x, t, s, tau, family.name))
        step = ((k - total) / slope).to(t.dtype)
        y, total = native.mask(x, t, step if s is None else step + s, tau, family.name)
        return y, step, rows.across(total)[0]
    values, slopes, sums = [], [], []
    for part in parts:
        u = argument(part, t, s, tau)
        values.append(family.f(u))
        slopes.append(family.slope_at(u, values[-1]))
        if known is None:
            sums.append((*rows.sums(values[-1]), *rows.rough(slopes[-1])) if rows.local else rows.sums(values[-1], slopes[-1]))
    total, slope = known or (torch.stack([a for a, _ in sums]).sum(0), torch.stack([b for _, b in sums]).sum(0))
    step = ((k - total) / slope).to(t.dtype)
    values = [y.addcmul_(v, step).clamp_(0, 1) for y, v in zip(values, slopes, strict=True)]
    total = torch.stack([rows.sums(y)[0] for y in values]).sum(0)
    return values[0] if len(values) == 1 else torch.cat(values, -1), step, total
