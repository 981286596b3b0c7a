r"""Where to cut: the threshold that makes a squashed row sum to k.

For an increasing squashing function :math:`F` from the reals to [0, 1], find :math:`t` such that

.. math:: \sum_i F((x_i - t) / \tau) = k .

Where values can be read without waiting, ordinary rows take a few Newton steps and a test of the result; rows that fail it, and all rows
where nothing can be read (other devices, traces), go to the search with a bracket, which runs a fixed number of rounds there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from khot._tensors import Number, is_bare, readable, wide_dtype
from khot.primitives.threshold.bracket import Solved, solve_bracket
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.quick import try_newton
from khot.primitives.threshold.rows import CACHE, LOCAL, Rows

_LONG = 1 << 15  # rows from here on start from a sample of themselves
_STRIDE = 31  # prime, so that it does not beat with a power-of-two period in the scores


def solve_rows(x: Tensor, k: Number, tau: Number, family: Family, rows: Rows = LOCAL) -> Solved:
    """The mask and the threshold of every row, without gradient.

    Args:
        x: ``(..., n)`` scores in float32 or float64; -inf takes no part, +inf comes first, a nan makes its own row nan.
        k: a number or ``(..., 1)``: at or below 0 nothing is selected, at or above the number of items everything.
        tau: temperature, a number or ``(..., 1)``.
        family: the squashing function.
        rows: the reductions over a row.
    """
    if isinstance(tau, Tensor):
        tau = tau.to(x.dtype).expand(*x.shape[:-1], 1)
    if isinstance(k, Tensor):
        k = k.to(wide_dtype(x)).expand(*x.shape[:-1], 1)
    # A reduction over processes waits for them in any case, so that values may be read behind it on every device.
    reads = readable(x) if rows.local else is_bare(x)
    if not reads or rows.empty(x):
        return solve_bracket(x, _as_column(k, x), tau, family, rows)
    if not rows.local or x.numel() < 2 * CACHE or x.numel() == x.shape[-1]:
        return _solve_read(x, k, tau, family, rows)
    # A few rows at a time, so that their temporaries stay in the cache.
    some = max(CACHE // x.shape[-1], 1)
    parts = x.reshape(-1, x.shape[-1]).split(some)
    mask, shift = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((*x.shape[:-1], 1))
    outs = zip(mask.view(-1, x.shape[-1]).split(some), shift.view(-1, 1).split(some), strict=True)
    for part, count, over, out in zip(parts, _split(k, some, len(parts)), _split(tau, some, len(parts)), outs, strict=True):
        for to, value in zip(out, _solve_read(part, count, over, family, rows), strict=True):
            to.copy_(value)
    return Solved(mask, shift)


def _split(value: Number, some: int, number: int) -> Sequence[Number]:
    return value.reshape(-1, 1).split(some) if isinstance(value, Tensor) else [value] * number


def _as_column(k: Number, x: Tensor) -> Tensor:
    return k if isinstance(k, Tensor) else torch.full((*x.shape[:-1], 1), k, dtype=wide_dtype(x), device=x.device)


def _solve_read(x: Tensor, k: Number, tau: Number, family: Family, rows: Rows) -> Solved:
    """:func:`solve_rows` for rows whose values can be read."""
    start = None
    if rows.local and x.shape[-1] >= _LONG:
        part = x[..., ::_STRIDE].contiguous()
        start = _solve_read(part, k * (part.shape[-1] / x.shape[-1]), tau, family, rows).shift
    mask, shift, passed = try_newton(x, k, tau, family, rows, start)
    if bool(passed.all()):
        return Solved(mask, shift)
    return _mend(Solved(mask, shift), ~passed.squeeze(-1), x, _as_column(k, x), tau, family, rows)


def _mend(tried: Solved, rest: Tensor, x: Tensor, k: Tensor, tau: Number, family: Family, rows: Rows) -> Solved:
    """Solve the rows named by ``rest`` with a bracket."""
    some = tau.expand_as(k)[rest] if isinstance(tau, Tensor) else tau
    mask, shift = solve_bracket(x[rest], k[rest], some, family, rows)
    if not rest.ndim:
        return Solved(mask[0], shift[0])
    tried.mask[rest], tried.shift[rest] = mask, shift
    return tried
