r"""Probabilities as whole numbers of a fixed small unit, so that rows sum to k without any rounding.

A float32 mask that should sum to k misses it in the last digits. Samplers that add probabilities up inherit the miss as a sample of
the wrong size. In integers, :math:`p_i = \mathrm{units}_i / 2^b` with :math:`\sum_i \mathrm{units}_i = k 2^b` exactly, sums are exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from khot._tensors import readable, wide_dtype
from khot.primitives.threshold.rows import LOCAL, Rows

_MAGIC = 0x4330000000000000  # the bits of 2.0 ** 52: a double in [2^52, 2^53] is these plus its distance from 2^52


class FixedPoint(NamedTuple):
    """Probabilities ``(..., n)`` in units of ``2 ** -bits``; each row sums to exactly ``k << bits``."""

    units: Tensor
    bits: int


def fixed_point(probs: Tensor, k: Tensor) -> FixedPoint:
    r"""Round a row to fixed point such that its sum is exactly ``k``.

    What the row lacks is spread as :math:`p_i (1 - p_i)`, which leaves 0 and 1 alone and stays between them; what rounding to units
    then leaves, at most n/2 of them, goes to one item with room for it. An item at 0 stays at 0, an item at 1 at 1.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, within rounding of the rows' sums.

    Example:
        >>> units, bits = fixed_point(torch.tensor([0.3, 0.3, 0.4]), torch.tensor([1]))
        >>> units.sum().item() == 2**bits
        True
    """
    bits = min(52, 62 - probs.shape[-1].bit_length())
    units, room = units_of(probs, k, bits)
    lack = (k.long() << bits) - units.sum(-1, keepdim=True)
    place = room.max(-1, keepdim=True).indices
    moved = units.gather(-1, place) + lack
    # One item takes it all if that leaves it off 0 and 1, which are certain.
    if readable(lack) and bool(((lack == 0) | (moved > 0) & (moved < 1 << bits)).all()):
        return FixedPoint(units.scatter_(-1, place, moved), bits)
    return FixedPoint(_absorb(units, lack, bits), bits)


def units_of(probs: Tensor, k: Tensor, bits: int, rows: Rows = LOCAL) -> tuple[Tensor, Tensor]:
    """Units that sum to ``k`` but for the rounding of each item, and how much room the items have."""
    wide, room = _spread_in_place(probs.detach().to(wide_dtype(probs), copy=True), k, rows)
    return _round(wide.mul_(2.0**bits)), room


def spread(probs: Tensor, k: Tensor) -> Tensor:
    """``probs`` in the wide dtype, moved by rounding only, so that rows sum to ``k``; 0 and 1 stay. Its gradient is that of ``probs``."""
    wide = probs.to(wide_dtype(probs))
    return wide + (_spread_in_place(wide.detach().clone(), k)[0] - wide.detach())


def _spread_in_place(wide: Tensor, k: Tensor, rows: Rows = LOCAL) -> tuple[Tensor, Tensor]:
    room = torch.addcmul(wide, wide, wide, value=-1)
    total, spare = rows.rough(wide, room)
    step = (k - total) / spare
    return wide.addcmul_(room, step.nan_to_num(0.0).clamp(-1, 1)).clamp_(0, 1), room


def _round(values: Tensor) -> Tensor:
    """To the nearest whole number; the way through the bits, in place, is the fast one."""
    if values.dtype != torch.float64 or not readable(values):  # vmap cannot look at bits before torch 2.7
        return values.round().long()
    return values.add_(2.0**52).view(torch.int64).sub_(_MAGIC)


def _absorb(units: Tensor, lack: Tensor, bits: int) -> Tensor:
    """Give what is lacking to the first items with room, or take it from the first that have it."""
    nothing = torch.zeros_like(lack)
    return absorbed(units, lack, bits, (nothing, nothing, nothing)).diff()


def absorbed(units: Tensor, lack: Tensor, bits: int, before: Sequence[Tensor]) -> Tensor:
    """The cumulative sums with what is lacking absorbed, ``(..., n + 1)``: one entry in front of the items, one behind each.

    Args:
        units: ``(..., n)``, the items here.
        lack: ``(..., 1)``, of the whole row.
        bits: of the unit.
        before: of the items of the row that stand before these: the sum, how many are above 0, how many are 1.
    """
    start = units.new_zeros((*units.shape[:-1], 1))
    sums, some, full = (
        torch.cat((start, part), -1).cumsum(-1) + ahead
        for part, ahead in zip((units, (units > 0).long(), (units == 1 << bits).long()), before, strict=True)
    )
    # Least and most that the first i items can hold. The increments of a maximum or minimum of two such sums lie between theirs.
    return torch.minimum(torch.maximum(sums + lack, full << bits), some << bits)
