"""Room for rounding: bounds are computed in float64 and widened after every step, so that they hold for real numbers.

A sum of n products is off by at most about n eps times the sum of their absolute values. Every operation adds that to its radius,
with a few units to spare, so that no rounding mode has to be set.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 2.0**-52
WORK = torch.float64


def room(magnitude: Tensor, terms: int = 1) -> Tensor:
    """What ``terms`` roundings of numbers of this size can add up to."""
    return magnitude * (EPS * (terms + 8))


def outward(lower: Tensor, upper: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The interval in ``dtype``, its ends rounded away from each other."""
    low, high = lower.to(dtype), upper.to(dtype)
    low = torch.where(low.to(WORK) > lower, low.nextafter(torch.full_like(low, -torch.inf)), low)
    high = torch.where(high.to(WORK) < upper, high.nextafter(torch.full_like(high, torch.inf)), high)
    return low, high
