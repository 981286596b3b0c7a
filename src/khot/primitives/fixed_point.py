r"""Probabilities as whole numbers of a fixed small unit, so that rows sum to k without any rounding.

A float32 mask that should sum to k misses it in the last digits. Samplers that add probabilities up inherit the miss as a sample of
the wrong size. In integers, :math:`p_i = \mathrm{units}_i / 2^b` with :math:`\sum_i \mathrm{units}_i = k 2^b` exactly, sums are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot.primitives.root import wide_dtype


class FixedPoint(NamedTuple):
    """Cumulative probabilities ``(..., n)`` in units of ``2 ** -bits``; the last of each row is exactly ``k``."""

    cumulative: Tensor
    bits: int


def fixed_point(probs: Tensor, k: Tensor) -> FixedPoint:
    r"""Round a row to fixed point such that its sum is exactly ``k``.

    What the row lacks is spread as :math:`p_i (1 - p_i)`, which leaves 0 and 1 alone and stays between them; what rounding to units
    then leaves goes to the first items with room. An item at 0 stays at 0, an item at 1 at 1.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, within rounding of the rows' sums.

    Example:
        >>> cumulative, bits = fixed_point(torch.tensor([0.3, 0.3, 0.4]), torch.tensor([1]))
        >>> cumulative[-1].item() == 2**bits
        True
    """
    bits = min(52, 62 - probs.shape[-1].bit_length())
    units = spread(probs, k).mul_(2.0**bits).round_().long()
    cumulative = units.cumsum(-1)
    lack = (k.long() << bits) - cumulative[..., -1:]
    # Least and most that the first i items can hold. The increments of a maximum or minimum of two such sums lie between theirs.
    most = (units > 0).cumsum(-1) << bits
    least = (units == 1 << bits).cumsum(-1) << bits
    return FixedPoint(torch.minimum(torch.maximum(cumulative.add_(lack), least), most), bits)


def spread(probs: Tensor, k: Tensor) -> Tensor:
    """``probs`` in the wide dtype, moved by rounding only, so that rows sum to ``k``; 0 and 1 stay."""
    wide = probs.to(wide_dtype(probs))
    room = wide * (1 - wide)
    step = (k - wide.sum(-1, keepdim=True)) / room.sum(-1, keepdim=True)
    return torch.addcmul(wide, room, step.nan_to_num(0.0).clamp(-1, 1)).clamp_(0, 1)
