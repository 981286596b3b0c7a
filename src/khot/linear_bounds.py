r"""Sound linear bounds of the two steps in Kth-Best, and what they say of the top-k of uncertain scores.

Kth-Best by counting is :math:`\sum_i \delta(\sum_j h(m_j - m_i) - k) x_i` with :math:`h(x) = [x \ge 0]` and
:math:`\delta(x) = [x = 0]`. To verify a network that selects by it, both are enclosed between two lines on an interval.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number, readable
from khot.checks import check_k, check_scores


class Lines(NamedTuple):
    """``lower_slope x + lower_intercept <= f(x) <= upper_slope x + upper_intercept`` on the interval."""

    lower_slope: Tensor
    lower_intercept: Tensor
    upper_slope: Tensor
    upper_intercept: Tensor


class Certified(NamedTuple):
    """Which items are in the top-k, and which are not, whatever the scores in their intervals."""

    kept: Tensor
    dropped: Tensor


def heaviside(lower: Tensor, upper: Tensor) -> Lines:
    r"""Lines below and above ``[x >= 0]`` for x between ``lower`` and ``upper``, of least area.

    Where the interval holds 0, the upper line is 1 or goes through (lower, 0) and (0, 1); the lower line is 0 or goes through (0, 0)
    and (upper, 1).

    Args:
        lower: any shape.
        upper: like ``lower``, not below it.

    Returns:
        Four tensors like ``lower``.

    Example:
        >>> heaviside(torch.tensor([-2.0]), torch.tensor([1.0])).upper_slope
        tensor([0.5000])
    """
    _check_interval(lower, upper)
    slack = 4 * torch.finfo(lower.dtype).eps  # for the rounding in a slope times x
    inside = (lower < 0) & (upper >= 0)
    base = (lower >= 0).to(lower.dtype)
    rise, fits_above = _reciprocal(-lower, inside & (upper < -lower))
    climb, fits_below = _reciprocal(upper, inside & (upper > -lower))
    above = torch.where(inside, torch.where(fits_above, 1 + slack, 1.0), base)
    below = torch.where(inside, torch.where(fits_below, -slack, 0.0), base)
    return Lines(climb, below.to(lower.dtype), rise, above.to(lower.dtype))


def delta(lower: Tensor, upper: Tensor) -> Lines:
    r"""Lines below and above ``[x = 0]`` for x between ``lower`` and ``upper``, of least area.

    Where the interval holds 0, the upper line goes through (0, 1) and the farther end at 0; the lower line is 0.

    Args:
        lower: any shape.
        upper: like ``lower``, not below it.

    Returns:
        Four tensors like ``lower``.

    Example:
        >>> delta(torch.tensor([-2.0]), torch.tensor([1.0]))[2:]
        (tensor([0.5000]), tensor([1.0000]))
    """
    _check_interval(lower, upper)
    slack = 4 * torch.finfo(lower.dtype).eps
    inside = (lower <= 0) & (upper >= 0)
    rise, left = _reciprocal(-lower, inside & (lower < 0) & (upper <= -lower))
    fall, right = _reciprocal(upper, inside & (upper > 0) & (upper > -lower))
    above = torch.where(inside, torch.where(left | right, 1 + slack, 1.0), 0.0).to(lower.dtype)
    below = (inside & (lower == upper)).to(lower.dtype)
    return Lines(torch.zeros_like(below), below, rise - fall, above)


def _reciprocal(value: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """``1 / value`` where asked and finite, 0 elsewhere, and where that was."""
    result = 1 / torch.where(where, value, 1.0)
    fits = where & result.isfinite() & (result > 0)
    return torch.where(fits, result, 0.0), fits


def _check_interval(lower: Tensor, upper: Tensor) -> None:
    for name, value in (("lower", lower), ("upper", upper)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{name} must be a floating tensor, got {getattr(value, 'dtype', type(value).__name__)}")
    if lower.shape != upper.shape or lower.dtype != upper.dtype:
        raise ValueError(f"lower and upper must be alike, got {tuple(lower.shape)} {lower.dtype} and {tuple(upper.shape)} {upper.dtype}")
    if readable(lower) and readable(upper) and bool((lower > upper).any()):
        raise ValueError("lower must not be above upper anywhere; swap the two")


def certify_topk(lower: Tensor, upper: Tensor, k: Number, *, dim: int = -1) -> Certified:
    r"""What is certain of the top-k when every score is only known to lie in an interval.

    The rank of an item lies between 1 plus the number of those that are ahead of it in any case and 1 plus the number of those that
    may be. It is kept for certain if the latter is at most ``k``, dropped if the former is above. As in :func:`khot.topk_mask`,
    the earlier of two equal scores is ahead and -inf is never kept. One sort of all the ends counts both, O(n log n).

    Args:
        lower: any shape, the least score of each item.
        upper: like ``lower``, its largest score.
        k: how many are selected along ``dim``; an int, or whole numbers of the shape of ``lower`` without ``dim``.
        dim: the dimension to select along.

    Returns:
        ``kept`` and ``dropped``: bool, like ``lower``, never both. A nan end is taken as no bound.

    Example:
        >>> certify_topk(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([3.0, 0.5, 2.5]), k=1)
        Certified(kept=tensor([False, False, False]), dropped=tensor([False,  True, False]))
    """
    check_scores(lower, dim, "lower")
    _check_interval(lower, upper)
    check_k(k, lower, dim)
    low = torch.where(lower.isnan(), -torch.inf, lower.detach()).movedim(dim, -1)
    high = torch.where(upper.isnan(), torch.inf, upper.detach()).movedim(dim, -1)
    count = k if isinstance(k, (int, float)) else k.to(low.device).expand(low.shape[:-1]).unsqueeze(-1)
    surely_ahead, maybe_ahead = _ahead(low, high)
    kept = (maybe_ahead < count) & (low > -torch.inf)
    dropped = (surely_ahead >= count) | (high == -torch.inf)
    return Certified(kept.movedim(-1, dim), dropped.movedim(-1, dim))


def _ahead(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """How many others are ahead of each item for certain, and how many may be."""
    ends = torch.stack([high, low], -1).flatten(-2)  # a stable sort then ranks equal ends by index, an item's upper end first
    order = ends.sort(dim=-1, descending=True, stable=True).indices
    is_low = order % 2
    lows_before = torch.zeros_like(order).scatter(-1, order, is_low.cumsum(-1) - is_low)
    highs_before = torch.zeros_like(order).scatter(-1, order, (1 - is_low).cumsum(-1) - (1 - is_low))
    return lows_before[..., 0::2], highs_before[..., 1::2] - 1  # an item's own upper end is always before its lower
