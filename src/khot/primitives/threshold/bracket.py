r"""The search that cannot miss: a bracket around the threshold of every row, and a mask between the masks at its two ends.

Let :math:`p` be the :math:`m`-th largest score with :math:`m = \lceil k \rceil`, and :math:`u_i = (x_i - p)/\tau + s`. As :math:`p` is a
score, :math:`x_i - p` is rounded once, and equal scores stay equal. For every increasing :math:`F` from the reals to [0, 1] the ``s``
that makes the row sum to ``k`` obeys

.. math:: F^{-1}\Bigl(\frac{k - m + 1}{n - m + 1}\Bigr) \le s \le F^{-1}\Bigl(\frac{k}{m}\Bigr) :

below the left end even with the :math:`m - 1` larger scores at 1 the sum stays under ``k``; above the right end the first :math:`m` alone
reach it. Whatever the scale of the scores, the bracket is a few dozen wide. Each round evaluates one point inside, which becomes a new
end. The result is the mask on the line between those at the two ends that sums to ``k``: its sum is right after any number of
rounds, also where the sum jumps; equal scores weigh the same, and its distance from the truth is less than the bracket allows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number, readable
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.rows import LOCAL, Rows

BLIND = {torch.float32: 12, torch.float64: 18}  # rounds where values cannot be looked at; two more make the mask
_LOOKING = 100  # rounds at most where they can: as many as bisection needs in float64


class Solved(NamedTuple):
    """``(..., n)`` mask and the ``(..., 1)`` threshold in the scores' own place."""

    mask: Tensor
    shift: Tensor


def solve_bracket(x: Tensor, k: Tensor, tau: Number, family: Family, rows: Rows = LOCAL) -> Solved:
    """The mask and the threshold of every row, for any row, without gradient.

    Args:
        x: ``(..., n)`` scores; -inf takes no part, +inf comes first, a nan makes its own row nan.
        k: ``(..., 1)`` in float64: at or below 0 nothing is selected, at or above the number of items everything.
        tau: temperature, a number or ``(..., 1)``.
        family: the squashing function.
        rows: the reductions over a row.
    """
    size = rows.size(x)
    inside = (k > 0) & (k < size)
    target = torch.where(inside, k, size / 2)  # a row that needs no search searches for something harmless
    rank = target.ceil()
    pivot = rows.largest(x, rank)
    ordinary = inside & pivot.isfinite()
    z = (x - torch.where(pivot.isfinite(), pivot, 0.0)) / tau
    low, high = _search(z, target, family, _ends(target, rank, size, family, x.dtype), rows)
    mask, s = _between(z, target, low, high, family, rows)
    lost = ~(s < torch.inf) | torch.isnan(k)
    if not (readable(ordinary) and bool((ordinary & ~lost).all())):
        mask = torch.where(ordinary, mask, _settled(x, k, pivot, size, rows)).masked_fill(lost, torch.nan)
    shift = torch.where(inside, pivot - s * tau, torch.where(k <= 0, torch.inf, -torch.inf)).to(x.dtype)
    return Solved(mask, shift.masked_fill(lost, torch.nan))


def _settled(x: Tensor, k: Tensor, pivot: Tensor, size: Tensor, rows: Rows) -> Tensor:
    """Rows that need no threshold: everything but the excluded, an equal share of ``k`` for those at +inf, or nothing."""
    (certain,) = rows.sums(x == torch.inf)
    share = (k / certain.clamp(min=1)).clamp(0, 1).to(x.dtype)
    everything = ((k >= size) | (pivot == -torch.inf)) & (k > 0)
    return torch.where(everything, (x > -torch.inf).to(x.dtype), torch.where(x == torch.inf, share, 0.0))


def _ends(k: Tensor, rank: Tensor, size: Tensor, family: Family, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The two ends of the bracket, moved outwards by what rounding may have done to them."""
    info = torch.finfo(dtype)
    low = family.inverse(((k - rank + 1) / (size - rank + 1)).clamp(min=info.tiny))
    high = family.inverse(k / rank)
    # Where F reaches 1 only at infinity, it is 1 in floating point long before.
    one = family.inverse(torch.ones_like(k))
    most = -family.inverse(torch.full_like(k, info.tiny)) if family.smooth else 2 * family.inverse(torch.full_like(k, 1 - info.eps / 2))
    high = torch.minimum(high, torch.where(one.isfinite(), one, most))
    slack = 8 * info.eps
    return (low - slack * (1 + low.abs())).to(dtype), (high + slack * (1 + high.abs())).to(dtype)


def _search(z: Tensor, k: Tensor, family: Family, ends: tuple[Tensor, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    """Narrow the bracket until the mask between its ends is exact to rounding."""
    low, high = ends
    eps = torch.finfo(z.dtype).eps
    s = family.inverse(torch.full_like(low, 0.5)).clamp(low, high)
    before, done = torch.full_like(s, torch.inf), torch.zeros_like(s, dtype=torch.bool)
    looks = readable(z)
    for _ in range(_LOOKING if looks else BLIND[z.dtype]):
        excess, step = measure(z, s, k, family, rows)
        low, high = torch.where(done | (excess > 0), low, s), torch.where(done | (excess < 0), high, s)
        size = step.abs()
        width = high - low
        # The mask between the ends is off by less than the product of their distances from the root, or by what is left over.
        close = size * width <= eps / 2 if family.smooth else excess.abs() <= eps / 8 * k.clamp(max=1)
        done = done | close | ~(excess.abs() > 0) | (width <= 2 * eps * (1 + low.abs()))
        if looks and bool(done.all()):
            break
        # A little further than the root, so that the next point lies on its other side and both ends close in.
        reach = s + step + step.sign() * (torch.minimum(size * size, size / 2) + 2 * eps * (1 + s.abs()))
        sound = (reach > low) & (reach < high) & (size < before / 2)
        s = torch.where(sound, reach, low + width / 2)
        before = torch.where(sound, size, torch.inf)
    return low, high


def measure(z: Tensor, s: Tensor, k: Tensor, family: Family, rows: Rows) -> tuple[Tensor, Tensor]:
    """By how much ``F(z + s)`` sums to more than ``k``, and the step in ``s`` that should mend it."""
    u = z + s
    if not family.smooth:
        y = family.f(u)
        total, slope = rows.sums(y, family.slope_at(u, y))
        return (total - k).to(z.dtype), ((k - total) / slope).to(z.dtype)
    # What those below have, and what those above lack. Either is known to its last digit also where the sum is k to rounding; and
    # the logarithm of their ratio is nearly straight in s, as the tails are exponentials.
    below = u < 0
    w = family.f(-u.abs())
    v = family.slope_at(u, w)
    total, have, slope, rise, count = rows.sums(w, w * below, v, v * below, ~below)
    missing = k - count
    top, bottom = have - missing.clamp(max=0), total - have + missing.clamp(min=0)
    step = torch.log(bottom / top) / (rise / top + (slope - rise) / bottom)
    return (top - bottom).to(z.dtype), step.to(z.dtype)


def _between(z: Tensor, k: Tensor, low: Tensor, high: Tensor, family: Family, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mask between those at ``low`` and ``high`` that sums to ``k``, and its place between them."""
    under, over = family.f(z + low), family.f(z + high)
    least, most = rows.sums(under, over)
    gap = most - least
    part = torch.where(gap > 0, (k - least) / torch.where(gap > 0, gap, 1.0), gap * 0).clamp(0, 1).to(z.dtype)
    return torch.lerp(under, over, part), low + part * (high - low)
