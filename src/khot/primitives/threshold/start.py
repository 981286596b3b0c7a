"""Where the search for a threshold begins: where a normal law with the mean and the variance of the row has its threshold."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, wide_dtype
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.rows import Rows

_PROBIT = math.pi / 8  # a logistic function averaged over a normal law of variance v is one stretched by sqrt(1 + pi v / 8) (MacKay)
_WIDE = 2  # how many times the variance of the noise the scores must have, so that its tails do not show
_NODES = 512
_GRID = 64  # points at a time, and nodes of the normal law, for an answer to 1e-3 of its range
_OCTAVE = 8  # variances of the scores that are told apart, from one to twice as much
_KEPT = 256  # answers that are remembered: a training asks for the same ones again and again


def guess(x: Tensor, k: Number, size: Number, tau: Number, family: Family, rows: Rows, free: Tensor | None = None) -> Tensor:
    """The threshold of a normal law with the mean and the variance of the row; items at -inf are left out.

    ``F`` is the law of a noise: its sum counts how many scores with noise lie above the threshold. That place is known for a normal law
    of a typical variance, and grows like the deviation of scores and noise together. ``free`` is a buffer like ``x``.
    """
    mean, spread, size = _moments(x, size, rows, free) if rows.local else _moments_at_once(x, size, rows)
    share = k / size
    centre, noise = _middle(family.inverse)
    ratio = (spread if not isinstance(tau, Tensor) and tau == 1 else spread / tau).square_()  # tau squared may overflow
    typical = float(ratio.mean()) if family.smooth or not isinstance(share, Tensor) else 0.0
    if not isinstance(share, Tensor) and family.quick is not None and 1e-6 < typical < 1e6 and 0 < share < 1:
        away = ratio.add_(noise).sqrt_().mul_(_stretch(family, share, round(_OCTAVE * math.log2(typical))))
    elif family.smooth and not typical > _WIDE * noise:
        away = ratio.mul_(_PROBIT).add_(1).sqrt_() * (_inverse(family.inverse, share, x) - centre)
    else:
        away = ratio.add_(noise).sqrt_() * _inverse(_normal_quantile, share, x)
    away = away.add_(centre) if centre else away
    return (mean - away * tau if isinstance(tau, Tensor) else torch.sub(mean, away, alpha=tau)).to(x.dtype)


@functools.lru_cache(_KEPT)
def _stretch(family: Family, share: float, grade: int) -> float:
    """By how much the deviation of scores and noise together is to be multiplied, to get from the centre to the threshold."""
    centre, noise = _middle(family.inverse)
    spread = 2 ** (grade / _OCTAVE / 2)
    nodes = spread * torch.special.ndtri((torch.arange(_GRID, dtype=torch.float64, device="cpu") + 0.5) / _GRID)
    reach = float(family.inverse(torch.full_like(nodes[0], min(share, 1 - share)))) - centre
    low, high = 2 * (reach - 4 * spread), 2 * (4 * spread - reach)
    for _ in range(2):
        points = torch.linspace(low, high, _GRID, dtype=torch.float64, device="cpu")
        below = int((family.f(nodes + points.unsqueeze(-1) + centre).mean(-1) < share).sum())
        low, high = float(points[max(below - 1, 0)]), float(points[min(below, _GRID - 1)])
    return (low + high) / 2 / math.sqrt(spread**2 + noise)


def _normal_quantile(share: Tensor) -> Tensor:
    return torch.special.ndtri(share.double()).to(share.dtype)


@functools.lru_cache(_KEPT)
def _middle(inverse: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The median and the variance of the law whose distribution function has this inverse, the latter to a few digits."""
    shares = (torch.arange(_NODES, dtype=torch.float64, device="cpu") + 0.5) / _NODES
    return quantile(inverse, 0.5), float(inverse(shares).var(correction=0))


def _moments(x: Tensor, size: Number, rows: Rows, free: Tensor | None) -> tuple[Tensor, Tensor, Number]:
    """Mean and deviation of the items that take part, and how many those are."""
    total = x.sum(-1, keepdim=True)
    if not math.isfinite(float(total.sum())):
        total, size = rows.rough(x.nan_to_num(0.0, torch.nan, 0.0), (x > -torch.inf).to(x.dtype))
    mean = total / size
    away = torch.sub(x, mean, out=free)
    if isinstance(size, Tensor):
        return mean, torch.linalg.vector_norm(away.nan_to_num_(0.0, 0.0, 0.0), dim=-1, keepdim=True) / size.sqrt(), size
    return mean, torch.linalg.vector_norm(away, dim=-1, keepdim=True).div_(math.sqrt(size)), size


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
    return mean.to(x.dtype), (square / size - mean * mean).clamp_(min=0.0).sqrt_().to(x.dtype), size


@functools.lru_cache(_KEPT)
def height(line: Callable[[Tensor], tuple[Tensor, Tensor]], share: float) -> float:
    """Where a straight function of the mean, see :func:`khot.primitives.threshold.family.logit_line`, has its goal."""
    return float(line(torch.full((1, 1), share, dtype=torch.float64, device="cpu"))[0])


def _inverse(inverse: Callable[[Tensor], Tensor], share: Number, x: Tensor) -> Number:
    return inverse(share).to(x.dtype) if isinstance(share, Tensor) else quantile(inverse, share)


@functools.lru_cache(_KEPT)
def quantile(inverse: Callable[[Tensor], Tensor], share: float) -> float:
    return float(inverse(torch.tensor(share, dtype=torch.float64, device="cpu")))
