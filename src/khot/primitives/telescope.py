r"""The matrix whose first ``i`` rows sum to the mask of ``i`` items, for ``i = 1 .. k``, made in pieces that stay in cache.

Row ``i`` is :math:`F((h - b_i)/\tau) - F((h - b_{i-1})/\tau)` with the cut :math:`b_i` for which the first term sums to ``i``. Native code
solves the cuts. Only they and the heights are kept, so that the way back makes each mask again instead of reading it from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot import kernels
from khot._tensors import Number, in_forward_mode
from khot.primitives.pieces import PIECE
from khot.primitives.threshold.autograd import solve_columns
from khot.primitives.threshold.family import Family

_FAR = 1e300  # a cut that no finite height comes near
_BLOCK = PIECE // 4  # several arrays of float64 are alive at once


def telescope(heights: Tensor, centres: Tensor, tau: Number, family: Family, dtype: torch.dtype) -> Tensor:
    """``(..., n), (..., k) -> (..., k, n)``, differentiable in ``heights`` and ``tau``.

    Args:
        heights: infinite for what is certain or excluded.
        centres: a height near each cut, without gradient.
        tau: temperature, a number or a ``(..., 1)`` column.
        family: of the masks.
        dtype: of the result.
    """
    number = not isinstance(tau, Tensor) and not in_forward_mode()
    if number and centres.numel() and kernels.pick("threshold", family.kernel, heights, 1.0, tau) is not None:
        return _Pieces.apply(heights, centres, tau, family, dtype)
    return _whole(heights, centres, tau, family).to(dtype)


def _whole(heights: Tensor, centres: Tensor, tau: Number, family: Family) -> Tensor:
    """All at once, by differentiable steps."""
    spread = heights.unsqueeze(-2) - centres.unsqueeze(-1)  # what lies near a cut keeps its digits
    over = tau.unsqueeze(-2).expand(*centres.shape, 1) if isinstance(tau, Tensor) else tau
    heads = solve_columns(spread, _counts(centres, 0), over, family)
    return torch.cat([heads[..., :1, :], heads.diff(dim=-2).clamp(min=0)], -2)


def _counts(centres: Tensor, start: int) -> Tensor:
    """``start + 1, start + 2, ..`` for every row, as a column."""
    k = centres.shape[-1]
    return torch.arange(start + 1, start + k + 1, dtype=centres.dtype, device=centres.device).expand_as(centres).unsqueeze(-1)


class _Pieces(Function):
    """The native way; a gradient that is differentiated again goes through the whole."""

    @staticmethod
    def forward(ctx: Any, heights: Tensor, centres: Tensor, tau: float, family: Family, dtype: torch.dtype) -> Tensor:
        k = centres.shape[-1]
        flat, near = heights.reshape(-1, heights.shape[-1]), centres.reshape(-1, k)
        out = torch.empty((len(flat), k, flat.shape[-1]), dtype=dtype, device=flat.device)
        cuts = torch.empty_like(near)
        last = torch.zeros_like(flat[:1, None])
        for rows, places in _blocks(*out.shape):
            heads, cuts[rows, places] = _heads(flat[rows], near[rows, places], places.start, tau, family)
            out[rows, places.start] = heads[:, 0] if places.start == 0 else (heads[:, 0] - last).clamp_(min=0)
            out[rows, places.start + 1 : places.stop] = heads.diff(dim=-2).clamp_(min=0)
            last = heads[:, -1]
        ctx.save_for_backward(heights, centres, cuts)
        ctx.rest = tau, family
        return out.reshape(*heights.shape[:-1], k, heights.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heights, centres, cuts = ctx.saved_tensors
        tau, family = ctx.rest
        native = kernels.pick("threshold", family.kernel, grad, 1.0, tau)
        if torch.is_grad_enabled() or in_forward_mode() or native is None:
            return _again(grad, heights, centres, tau, family), None, None, None, None
        flat, grads = heights.reshape(-1, heights.shape[-1]), grad.reshape(-1, *grad.shape[-2:])
        total = torch.zeros_like(flat)
        for rows, places in _blocks(*grads.shape):
            heads = family.f((flat[rows].unsqueeze(-2) - cuts[rows, places].unsqueeze(-1)).div_(tau))
            into = native.backward(_steps(grads[rows], places, heads.dtype), heads, tau, family.kernel, curve=family.curve)[0]
            total[rows] += into.sum(-2)
        return total.reshape(heights.shape), None, None, None, None


def _again(grad: Tensor, heights: Tensor, centres: Tensor, tau: float, family: Family) -> Tensor:
    """The gradient as a function that can be differentiated."""
    with torch.enable_grad():
        heights = heights if heights.requires_grad else heights.detach().requires_grad_()
        out = _whole(heights, centres, tau, family)
        return torch.autograd.grad(out, heights, grad.to(out.dtype), create_graph=True)[0]


def _blocks(batch: int, k: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of the batch and of the places, a block of each small enough to stay in cache; places in order."""
    together = max(1, _BLOCK // max(1, n))
    many, some = max(1, together // k), min(k, together)
    for row in range(0, batch, many):
        for place in range(0, k, some):
            yield slice(row, min(batch, row + many)), slice(place, min(k, place + some))


def _heads(heights: Tensor, near: Tensor, start: int, tau: float, family: Family) -> tuple[Tensor, Tensor]:
    """The masks of ``start + 1, start + 2, ..`` items, and their cuts."""
    spread, counts = heights.unsqueeze(-2) - near.unsqueeze(-1), _counts(near, start)
    native = kernels.pick("threshold", family.kernel, spread, counts, tau)
    assert native is not None, "the kernel that took the heights takes their differences"
    heads, shift = native.forward(spread, counts, tau, family.kernel, curve=family.curve)
    return heads, torch.where(_settled(heights, counts.squeeze(-1)), _FAR, near + shift.squeeze(-1))


def _settled(heights: Tensor, counts: Tensor) -> Tensor:
    """Which masks hold what is certain or all that is not excluded: they have no cut, and do not move."""
    certain, most = (heights == torch.inf).sum(-1, keepdim=True), (heights != -torch.inf).sum(-1, keepdim=True)
    return (counts <= certain) | (counts >= most)


def _steps(grads: Tensor, places: slice, dtype: torch.dtype) -> Tensor:
    """The gradient in each mask: it is added in its own row and taken away in the next one."""
    steps = grads[:, places].to(dtype, copy=True)
    below = grads[:, places.start + 1 : places.stop + 1]
    steps[:, : below.shape[1]] -= below
    return steps
