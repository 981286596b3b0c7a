r"""The search for ordinary rows that lie in memory here: Newton steps from a good start, and a test of what came out.

It reads values, so that it runs where that is free (ordinary CPU tensors). Rows that fail the test go to the search with a bracket.
A new tensor costs as much as the arithmetic in it, and a call into torch as much as a thousand scores: hence two buffers that are used
again and again, sums to a few digits until the last pass, and numbers that stay numbers.

The last pass takes the mask :math:`y` at a threshold next to the root, its sum in float64 and its slopes :math:`v`, and moves along
them: :math:`y + v s` with :math:`s = (k - \sum y)/\sum v`. What that leaves out is :math:`\sum |F''| s^2/2`, so that with
:math:`|F''| \le B F'` the sum is right to rounding where :math:`B s^2 \sum v` is small beside ``k``. That is the test, and a plain
sum of the result is held against ``k`` besides. A mask with corners is evaluated anew until its sum in float64 is right.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from khot._tensors import Number
from khot.primitives.threshold.family import Family, logit_line
from khot.primitives.threshold.rows import LOCAL, wide_sum
from khot.primitives.threshold.start import guess, height

_ROUNDS = 8  # rows that need more are better served by the bracket
_CAREFUL_ROUNDS = 24  # for the few rows that are tried once more
_PLAIN_ROUNDS = 4  # and before that, without a bracket: most of them are nearly there
_STRIDE = 8.0  # the longest step of those, in temperatures
_TRIES = 5  # corrections of a mask with corners
_NEAR = 0.001  # a step beyond which few corners lie: then a sum in float64 is worth its time


class Work(NamedTuple):
    """A few rows, or one long row in parts: each with its place in the output and two buffers."""

    parts: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]  # scores, mask, buffers
    n: int
    k: Number
    tau: Number
    family: Family
    careful: bool = False  # a second try: no row is left behind for the sake of the others


class Found(NamedTuple):
    """The thresholds, and which rows passed the test; ``None`` for all of them."""

    shift: Tensor
    passed: Tensor | None


def solve_ordinary(work: Work, start: Tensor | None) -> Found:
    """Write the mask of rows without surprises; ``start`` is where to begin, needed for a row in parts."""
    x, _, free, _ = work.parts[0]
    t = guess(x, work.k, float(work.n), work.tau, work.family, LOCAL, free) if start is None else start
    if work.family.smooth:
        return _along(work, _on_curves(work, t))
    return _across(work, *_on_corners(work, t))


def _argument(x: Tensor, t: Tensor, tau: Number, out: Tensor) -> Tensor:
    """``(x - t) / tau``."""
    torch.sub(x, t, out=out)
    return out if not isinstance(tau, Tensor) and tau == 1 else out.div_(tau)


def _move(t: Tensor, step: Tensor, tau: Number, times: float = 1.0) -> Tensor:
    """``t + times * step * tau``."""
    return torch.addcmul(t, step, tau, value=times) if isinstance(tau, Tensor) else torch.add(t, step, alpha=times * tau)


def _rough(work: Work, t: Tensor) -> tuple[Tensor, Tensor]:
    """What the squashed row sums to, and its slopes, to a few digits."""
    found = [work.family.measure(_argument(x, t, work.tau, one), two) for x, _, one, two in work.parts]
    return found[0] if len(found) == 1 else (_add_up([a for a, _ in found]), _add_up([b for _, b in found]))


def _on_curves(work: Work, t: Tensor) -> Tensor:
    """Newton steps on a function of the mean that is nearly straight: in the tails the sum grows like exp(t)."""
    family = work.family
    line = logit_line if family.quick is None else family.quick.line
    share = work.k / work.n
    goal = line(share)[0].to(t.dtype) if isinstance(share, Tensor) else height(line, share)
    enough = (_least(family, t.dtype) / (1.0 if family.quick is None else family.quick.bow)) ** 0.5

    def step_of(total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor | None]:
        level, run = line(total / work.n)
        step = level.sub_(goal).mul_(run).div_(slope).mul_(-work.n)
        return step, step.abs() <= enough if work.careful else None

    if work.careful:
        return _between(work, t, step_of)[0]
    for _ in range(_ROUNDS):
        step, _ = step_of(*_rough(work, t))
        t = _move(t, step, work.tau, -1.0)
        if not float(vector_norm(step, math.inf)) > enough or _nearly_all(step.abs_() <= enough):
            break
    return t


def _between(work: Work, t: Tensor, step_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Steps between the points already seen, and until all rows are there; the threshold, and the slope there."""
    low, high, slope = torch.full_like(t, -math.inf), torch.full_like(t, math.inf), t
    for _ in range(_CAREFUL_ROUNDS):
        total, slope = _rough(work, t)
        step, close = step_of(total, slope)
        there = _move(t, step.clamp(-_STRIDE, _STRIDE), work.tau, -1.0)
        low, high = torch.where(total >= work.k, t, low), torch.where(total <= work.k, t, high)
        t = torch.where((there > low) & (there < high) | close, there, (low + high) / 2)  # pyright: ignore
        if bool(close.all()):  # pyright: ignore
            break
    return t, slope


def _least(family: Family, dtype: torch.dtype) -> float:
    """The last step that leaves out less than rounding."""
    return (torch.finfo(dtype).eps / 2 / family.bend) ** 0.5


def _nearly_all(settled: Tensor) -> bool:
    return int(settled.sum()) * 16 >= 15 * settled.numel()


def _along(work: Work, t: Tensor) -> Found:
    """The mask with a last step along its slopes."""
    family, k = work.family, work.k
    totals, slopes = [], []
    for x, out, one, two in work.parts:
        u = _argument(x, t, work.tau, one)
        family.write(u, out)
        totals.append(wide_sum(out, two))
        slopes.append(family.write_slope(u, out, two).sum(-1, keepdim=True))
    slope = _add_up(slopes)
    step = (k - _add_up(totals)).div_(slope).to(t.dtype)
    for x, out, one, two in work.parts:
        if len(work.parts) > 1:  # the buffer has the slopes of the last part
            family.write_slope(_argument(x, t, work.tau, one), out, two)
        out.addcmul_(two, step)
    return Found(_move(t, step, work.tau, -1.0), _tested(work, step, slope))


def _tested(work: Work, step: Tensor, slope: Tensor) -> Tensor | None:
    """Which rows passed; ``None`` for all. A slope is at most ``bend`` times its value, so that a small step is enough for all rows."""
    k, bend, eps = work.k, work.family.bend, torch.finfo(step.dtype).eps
    off = _add_up([out.sum(-1, keepdim=True) for _, out, _, _ in work.parts]) - k
    allowed = (2 + math.log2(work.n)) * eps * k
    if not isinstance(k, Tensor):
        small = float(vector_norm(step, math.inf)) <= _least(work.family, step.dtype) / bend**0.5
        if small and float(vector_norm(off, math.inf)) <= allowed:
            return None
    tails = step.abs() <= eps**0.5  # those keep their digits, and no value leaves [0, 1]
    return tails & (step.square() * slope * (2 * bend) <= eps * k) & (off.abs() <= allowed)


def _on_corners(work: Work, t: Tensor) -> tuple[Tensor, Tensor]:
    """Newton steps on the sum until only small ones are left; the threshold, and the slope there."""
    eps = torch.finfo(t.dtype).eps

    def step_of(total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor | None]:
        missing = (work.k - total).to(t.dtype)
        step = missing / slope.clamp_(min=1)  # one item at least moves with the threshold before long
        return step, missing.abs() <= eps * (64 * slope + 4 * total) if work.careful else None

    if work.careful:
        for _ in range(_PLAIN_ROUNDS):
            total, slope = _rough(work, t)
            step, close = step_of(total, slope)
            short = ((work.k - total) / work.k).clamp_(0, 1).to(t.dtype)  # the more is missing, the faster the sum grows on the way
            there = _move(t, step.mul_(1 - short * (0.5 + short / 6)), work.tau, -1.0)
            if bool(close.all()):  # pyright: ignore
                return there, slope
            t = torch.where(there.isfinite(), there, t)
        return _between(work, t, step_of)
    slope = t
    for i in range(_ROUNDS):
        total, slope = _rough(work, t)
        step, _ = step_of(total, slope)
        t = _move(t, step, work.tau, -1.0)
        if i and (float(vector_norm(step, math.inf)) <= _NEAR or _nearly_all(step.abs_() <= _NEAR)):
            break
    return t, slope


def _across(work: Work, t: Tensor, slope: Tensor) -> Found:
    """The mask with the threshold mended until its sum is right."""
    family, k, shift = work.family, work.k, torch.zeros_like(t)
    best, missing = k * torch.finfo(t.dtype).eps, t
    for i in range(_TRIES):
        for x, out, one, two in work.parts:
            u = one if i and len(work.parts) == 1 else _argument(x, t, work.tau, one)
            family.write(torch.add(u, shift, out=two) if i else u, out)
        missing = k - _add_up([wide_sum(out, two) for _, out, _, two in work.parts])
        if i == _TRIES - 1 or _nearly_all(missing.abs() <= best):
            break
        shift = (shift + missing / slope).to(t.dtype)
    passed = missing.abs() <= best
    if len(work.parts) == 1 and not (bool(passed.all()) if work.careful else _nearly_all(passed)):
        passed = _mend_values(work, t, shift, missing.masked_fill(passed, 0.0))
    return Found(_move(t, shift, work.tau, -1.0), passed)


def _mend_values(work: Work, t: Tensor, shift: Tensor, missing: Tensor) -> Tensor:
    """Where arguments are too coarse for the sum to be right: a step along the slopes, so small that it crosses no corner."""
    ((x, out, one, two),) = work.parts
    eps = torch.finfo(t.dtype).eps
    v = work.family.write_slope(torch.add(_argument(x, t, work.tau, one), shift, out=two), out, one)
    slope = v.sum(-1, keepdim=True).clamp_(min=torch.finfo(t.dtype).tiny)
    step = (missing / slope).to(t.dtype)
    out.addcmul_(v, step).clamp_(0, 1)
    off = (work.k - wide_sum(out)).abs()
    small = step.abs() <= 4 * eps + 2 * torch.finfo(off.dtype).eps * work.k / slope
    return small & (off <= work.k * (eps * (1 + _roundings(t.dtype, work.n))))


def _roundings(dtype: torch.dtype, n: int) -> float:
    """How often a sum of a row in its own dtype rounds, added up in pairs; nothing where a wider dtype takes the sum."""
    return 0.0 if dtype == torch.float32 else math.log2(n)


def _add_up(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.stack(columns).sum(0)
