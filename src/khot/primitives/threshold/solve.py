r"""Where to cut: the threshold that makes a squashed row sum to k.

For an increasing squashing function :math:`F` from the reals to [0, 1], find :math:`t` such that

.. math:: \sum_i F((x_i - t) / \tau) = k .

Where values can be read without waiting, ordinary rows take a few Newton steps and a test of the result; rows that fail it, and all rows
where nothing can be read (other devices, traces), go to the search with a bracket, which runs a fixed number of rounds there.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from khot._tensors import Number, is_bare, is_traced, readable, wide_dtype
from khot.primitives.threshold.bracket import Solved, solve_bracket
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.inplace import Work, solve_ordinary
from khot.primitives.threshold.quick import try_newton
from khot.primitives.threshold.rows import CACHE, LOCAL, Rows

_LONG = 1 << 15  # rows from here on start from a sample of themselves
_STRIDE = 31  # prime, so that it does not beat with a power-of-two period in the scores
_kept = threading.local()


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
    if rows.local:
        return _solve_here(x, k, tau, family)
    mask, shift, passed = try_newton(x, k, tau, family, rows)
    return _mend(Solved(mask, shift), passed, x, k, tau, family, rows)


def _solve_here(x: Tensor, k: Number, tau: Number, family: Family) -> Solved:
    """:func:`solve_rows` for rows whose values can be read: so many at a time that their temporaries stay in the cache."""
    n = x.shape[-1]
    flat = x.detach().reshape(-1, n).contiguous()
    k, tau = (value.reshape(-1, 1) if isinstance(value, Tensor) else value for value in (k, tau))
    to = Solved(torch.empty_like(flat), flat.new_empty((len(flat), 1)))
    some = min(max(2 * CACHE // n, 1), len(flat))
    free = _buffers(flat, some, n if n <= 2 * CACHE else CACHE)
    failed = []
    for begin in range(0, len(flat), some):
        whole = some == len(flat)
        rows = slice(begin, begin + some)
        part = (flat, k, tau, to) if whole else (flat[rows], _at(k, rows), _at(tau, rows), Solved(to.mask[rows], to.shift[rows]))
        passed = _solve_some(*part, family, free)
        if passed is not None and not bool(passed.all()):
            failed.append(begin + passed.logical_not_().flatten().nonzero().flatten())
    if failed:
        _try_again(torch.cat(failed), flat, k, tau, family, to, free)
    return Solved(to.mask.view(x.shape), to.shift.view(*x.shape[:-1], 1))


def _buffers(like: Tensor, rows: int, width: int) -> Tensor:
    """Two buffers, which a thread keeps: fresh pages would cost as much as the arithmetic. A mode or transform gets its own."""
    if is_traced():
        return like.new_empty((2, rows, width))
    held = _kept.__dict__.get(str(like.dtype))
    if held is None or held.numel() < 2 * rows * width:
        with torch.inference_mode(False):
            held = _kept.__dict__[str(like.dtype)] = torch.empty(2 * rows * width, dtype=like.dtype, device="cpu")
    return held[: 2 * rows * width].view(2, rows, width)


def _at(value: Number, rows: slice | Tensor) -> Number:
    return value[rows] if isinstance(value, Tensor) else value


def _solve_some(x: Tensor, k: Number, tau: Number, to: Solved, family: Family, free: Tensor) -> Tensor | None:
    """Write the mask and the threshold of ``(rows, n)`` scores, with two buffers; which rows passed, ``None`` for all."""
    start, n = None, x.shape[-1]
    if n >= _LONG:
        part = x[:, ::_STRIDE]
        start = _solve_here(part, k * (part.shape[-1] / n), tau, family).shift
    shift, passed = solve_ordinary(Work(_parts(x, to.mask, free), n, k, tau, family), start)
    to.shift.copy_(shift)
    return passed


def _parts(x: Tensor, mask: Tensor, free: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]:
    """The rows, or a long row in parts as wide as the buffers, beside their places in the mask and the two buffers."""
    one, two = free if len(x) == free.shape[1] else free[:, : len(x)]
    width = free.shape[-1]
    if width >= x.shape[-1]:
        return ((x, mask, one, two),)
    return tuple(
        (a, b, one[:, : a.shape[-1]], two[:, : a.shape[-1]]) for a, b in zip(x.split(width, -1), mask.split(width, -1), strict=True)
    )


def _try_again(rest: Tensor, x: Tensor, k: Number, tau: Number, family: Family, to: Solved, free: Tensor) -> None:
    """The few rows that held up the others, or were lost: once more with care, and then with a bracket."""
    x, k, tau = x[rest], _at(k, rest), _at(tau, rest)
    again = Solved(torch.empty_like(x), to.shift[rest])
    if len(rest) <= free.shape[1] and free.shape[-1] >= x.shape[-1]:
        # Steps between corners have come near, most of all where they were too few.
        start = None if family.smooth or not bool(again.shift.isfinite().all()) else again.shift
        shift, passed = solve_ordinary(Work(_parts(x, again.mask, free), x.shape[-1], k, tau, family, careful=True), start)
        again = Solved(again.mask, shift) if passed is None else _mend(Solved(again.mask, shift), passed, x, k, tau, family, LOCAL)
    else:
        again = solve_bracket(x, _as_column(k, x), tau, family)
    to.mask[rest], to.shift[rest] = again


def _as_column(k: Number, x: Tensor) -> Tensor:
    return k if isinstance(k, Tensor) else torch.full((*x.shape[:-1], 1), k, dtype=wide_dtype(x), device=x.device)


def _mend(tried: Solved, passed: Tensor, x: Tensor, k: Number, tau: Number, family: Family, rows: Rows) -> Solved:
    """Solve the rows that did not pass with a bracket, in place."""
    if bool(passed.all()):
        return tried
    rest, k = ~passed.squeeze(-1), _as_column(k, x)
    some = tau.expand_as(k)[rest] if isinstance(tau, Tensor) else tau
    mask, shift = solve_bracket(x[rest], k[rest], some, family, rows)
    if not rest.ndim:
        return Solved(mask[0], shift[0])
    tried.mask[rest], tried.shift[rest] = mask, shift
    return tried
