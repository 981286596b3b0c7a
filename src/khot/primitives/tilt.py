r"""Logits of a k-subset distribution as independent coins that expect about k heads.

A common shift of all logits changes the weights of all k-subsets alike. At the right one the coins :math:`p_i = \sigma(\lambda_i - t)`
have k for the mode of their number of heads, and nothing that is computed from them can underflow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._tensors import in_transform, is_recorded, readable, wide_dtype
from khot.primitives.operators import define


class Coins(NamedTuple):
    """The tilted coins of ``R`` rows."""

    tails_heads: Tensor  # (2, n, R)
    log_odds: Tensor  # (n, R)
    k: Tensor  # (R,) how many heads
    free_k: Tensor  # (R,) how many of them among the free
    shift: Tensor  # (R,)
    few: Tensor  # (R,) k, or n - k where that is less
    many: Tensor | None  # (R,) where it is less; None: nowhere
    size: int  # no entry of few is larger


def tilt(logits: Tensor, k: Tensor | int) -> Coins:
    """The coins of every row at the shift where they expect ``k`` heads; -inf never shows heads, +inf always.

    Args:
        logits: ``(..., n)``.
        k: a whole number, or ``(..., 1)`` whole numbers.
    """
    n, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    x = logits.reshape(rows, n)
    rest = sizes = _column(k, logits)
    free = x.isfinite()
    whole = readable(free) and bool(free.all())
    if not whole:
        rest = sizes - (x == torch.inf).sum(-1, keepdim=True)
    recorded = is_recorded() and not in_transform()  # one operator: a compiler must not unroll the search
    t, s = (torch.ops.khot.tilt_shift if recorded else _shift)(x.detach(), rest, None if whole else free, _most(k, n))
    wide = x.to(t.dtype)
    u = wide - t + s if whole else torch.where(free, torch.where(free, wide, 0.0) - t + s, wide)
    u = u.T.contiguous()
    few, many, size = _fewer(k, sizes.squeeze(-1), n)
    return Coins(torch.sigmoid(torch.stack((-u, u))), u, sizes.squeeze(-1), rest.squeeze(-1), (t - s).squeeze(-1), few, many, size)


def _column(k: Tensor | int, logits: Tensor) -> Tensor:
    """``k`` of each of ``R`` rows, ``(R, 1)``."""
    batch = logits.shape[:-1]
    if not isinstance(k, Tensor):
        return torch.full((math.prod(batch), 1), k, dtype=torch.long, device=logits.device)
    return k.to(logits.device).expand(*batch, 1).reshape(math.prod(batch), 1)


def _most(k: Tensor | int, n: int) -> int:
    """The largest ``k``; ``n`` where it cannot be known here."""
    return largest(k, n) if isinstance(k, Tensor) else k


def largest(k: Tensor, bound: int) -> int:
    """The largest number in ``k``, 0 if there is none; ``bound`` where it cannot be read here."""
    if not k.numel():
        return 0
    return int(k.max()) if readable(k) else bound


def _fewer(k: Tensor | int, sizes: Tensor, n: int) -> tuple[Tensor, Tensor | None, int]:
    """Rows that want more than half heads count tails instead: how many of the rarer side, where that is tails, and a bound."""
    many = 2 * sizes > n
    none = not bool(many.any()) if readable(many) else not isinstance(k, Tensor) and 2 * k <= n
    few = sizes if none else torch.where(many, n - sizes, sizes)
    if isinstance(k, Tensor):
        return few, None if none else many, largest(few, n // 2)
    if not 0 <= k <= n:  # nobody has checked it: nothing, or everything
        few = few.clamp(min=0)
    size = max(0, min(k, n - k))
    return few, None if none else many, size


def _shift(x: Tensor, k: Tensor, free: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """``t`` and ``s`` such that ``sum sigmoid(x - t + s)`` is so near to ``k`` that k is about the mode.

    ``t`` is the k-th largest, near which differences are exact however large the logits; ``s`` is then of the order of log n.
    """
    n = x.shape[-1]
    if n == 0:
        return x.new_zeros(k.shape, dtype=wide_dtype(x)), x.new_zeros(k.shape, dtype=wide_dtype(x))
    size = n if free is None else free.sum(-1, keepdim=True)
    x = x if free is None else torch.where(free, x, -torch.inf)
    top = x.topk(min(n, max(1, most))).values
    t = top.gather(-1, (k - 1).clamp(0, top.shape[-1] - 1))
    t = torch.where(t.isfinite(), t, 0.0).to(wide_dtype(x))
    shift = _near_shift((x - t).float(), k.float(), n)
    # Where none or all of the free coins are heads it would be infinite; far away is as good.
    shift = torch.where(k <= 0, 40.0, torch.where(k >= size, -40.0, shift))
    return t, -shift.to(wide_dtype(x))


def _near_shift(x: Tensor, k: Tensor, n: int) -> Tensor:
    """Newton inside a bracket that holds when the k-th largest is 0, until k is within half a standard deviation or 1/4."""
    low, high = -(4 * k.clamp(min=1)).log() - 1, torch.full_like(k, math.log(n) + 1)
    shift = torch.zeros_like(k)
    for _ in range(40):
        p = torch.sigmoid(x - shift)
        total = p.sum(-1, keepdim=True)
        excess, variance = total - k, total - p.square().sum(-1, keepdim=True)
        far = 4 * excess.square() > variance.clamp(min=0.25)
        if readable(far) and not bool(far.any()):
            break
        low, high = torch.where(excess > 0, shift, low), torch.where(excess > 0, high, shift)
        newton = shift + (total / k).log() * total / variance  # on the logarithm of the sum, which is nearly straight for k << n
        newton = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
        shift = torch.where(far, newton, shift)
    return shift


def _fake(x: Tensor, k: Tensor, free: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(k.shape, dtype=wide_dtype(x)), x.new_empty(k.shape, dtype=wide_dtype(x))


define("tilt_shift(Tensor x, Tensor k, Tensor? free, SymInt most) -> (Tensor, Tensor)", _shift, _fake)
