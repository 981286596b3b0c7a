r"""Soft ranks and soft sorting: projections onto the permutahedron, each one sort and one isotonic regression.

With the values sorted, every block of the isotonic fit is solved by itself. Within a block the ranks are, about their mean, the values
over ``tau`` (``l2``), or their softmax times the places of the block (``kl``). So a row is told by its order and its blocks; the formula
on these is differentiable as often as one likes, and the native code is tested against it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn.functional import pad

from khot import kernels
from khot._tensors import Number, column, in_forward_mode, wide_dtype
from khot.kernels.order import Law
from khot.primitives.isotonic import block_first, block_logsumexp, block_mean, block_sum, find_blocks
from khot.primitives.order import descending_order

Regularization = Literal["l2", "kl"]


def ranks(x: Tensor, tau: Number, regularization: Regularization, *, descending: bool = False, wide: bool = False) -> Tensor:
    """Soft ranks of ``(..., n)`` from 1 to n.

    Args:
        x: infinite values rank at the ends, a nan makes its own row nan.
        tau: a number or ``(...)``.
        regularization: ``"l2"`` or ``"kl"``.
        descending: rank 1 is the largest.
        wide: return float64, where the device has it: the ranks of long rows need the digits.
    """
    return _solve(x, tau, Law(_number(regularization), -1.0 if descending else 1.0, 1.0, wide=wide))


def heights(scores: Tensor, k: int, tau: Number, regularization: Regularization) -> Tensor:
    """Minus the descending ranks, about that of the k-th largest: what lies near it keeps its digits. Infinite scores stay."""
    n = scores.shape[-1]
    return _solve(scores, tau, Law(_number(regularization), -1.0, -1.0, centre=min(n, n - k + 1)))


def sorted_values(x: Tensor, tau: Number, regularization: Regularization, *, descending: bool = False) -> Tensor:
    """Soft sort of ``(..., n)``. Ascending is the negative of the descending sort of the negated values."""
    sign = 1.0 if descending else -1.0
    return _solve(x, tau, Law(2 + _number(regularization), sign, sign))


def check_regularization(regularization: str) -> None:
    if regularization not in ("l2", "kl"):
        raise ValueError(f"regularization must be 'l2' or 'kl', got {regularization!r}")


def _number(regularization: Regularization) -> int:
    return int(regularization == "kl")


def _solve(x: Tensor, tau: Number, law: Law) -> Tensor:
    if x.shape[-1] == 0:
        return x.to(wide_dtype(x) if law.wide else x.dtype)
    tau = column(tau, x)
    native = None if in_forward_mode() else kernels.pick("ranks", x, tau)
    if native is None:
        return _formula(x, tau, *_order_and_blocks(x, tau, law), law)
    if torch.is_grad_enabled() and (x.requires_grad or isinstance(tau, Tensor) and tau.requires_grad):
        return _Native.apply(x, tau, law, native)
    return native.forward(x, tau, law)[0]


class _Native(Function):
    """Keeps the values, their order and where blocks begin; a gradient that is differentiated again goes through the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tau: Number, law: Law, native: Any) -> Tensor:
        out, items = native.forward(x, tau, law)
        learns_tau = isinstance(tau, Tensor)
        ctx.law, ctx.native, ctx.tau = law, native, None if learns_tau else tau
        ctx.save_for_backward(x, items, *((tau,) if learns_tau else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, items, *rest = ctx.saved_tensors
        tau = rest[0] if rest else ctx.tau
        if torch.is_grad_enabled() or in_forward_mode() or kernels.pick("ranks", x, tau, grad) is not ctx.native:
            return *_gradients(grad, x, items, tau, ctx.law, ctx.needs_input_grad), None, None
        in_x, in_tau = ctx.native.backward(grad, x, items, tau, ctx.law)
        return in_x, in_tau.to(rest[0].dtype) if rest else None, None, None


def _gradients(grad: Tensor, x: Tensor, items: Tensor, tau: Number, law: Law, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """The same by the formula, so that it can be differentiated itself."""
    again = torch.is_grad_enabled()
    fresh = items < 0
    order, blocks = torch.where(fresh, ~items, items).long(), fresh.long().cumsum(-1) - 1
    inputs = [value for value, need in zip((x, tau), needed, strict=False) if need and isinstance(value, Tensor)]
    with torch.enable_grad():
        out = _formula(x, tau, order, blocks, law)
    found = iter(torch.autograd.grad(out, inputs, grad, create_graph=again, materialize_grads=True))
    return [next(found) if need else None for need in needed[:2]]


def _order_and_blocks(x: Tensor, tau: Number, law: Law) -> tuple[Tensor, Tensor]:
    values = law.sign * x.detach()
    order = descending_order(values)
    ordered = values.to(wide_dtype(x)).gather(-1, order)
    over = torch.as_tensor(tau, dtype=ordered.dtype, device=x.device).detach()
    return order, (_rank_blocks if law.number < 2 else _value_blocks)(ordered, over, kl=law.number % 2 == 1)


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device).expand_as(x)


def _rank_blocks(x: Tensor, tau: Tensor, kl: bool) -> Tensor:
    """The blocks of sorted values that share their ranks.

    Ranks lie between 1 and n, so that values too far apart never share a block. Cutting their gap down to that distance changes no
    block and keeps the sums short.
    """
    places = _places(x)
    reach = torch.log(places[..., :1]) + 1 if kl else places[..., :1]
    gaps = torch.where(x[..., 1:] == x[..., :-1], 0.0, (x[..., :-1] - x[..., 1:]) / tau)
    fallen = pad(-torch.minimum(gaps, reach).cumsum(-1), (1, 0))
    return find_blocks(fallen, places.log(), logs=True) if kl else find_blocks(fallen - places, None, logs=False)


def _value_blocks(x: Tensor, tau: Tensor, kl: bool) -> Tensor:
    """The blocks of places that share their distance to the sorted values."""
    ramp = _places(x) / tau
    return find_blocks(ramp, x, logs=True) if kl else find_blocks(ramp - x, None, logs=False)


def _formula(x: Tensor, tau: Number, order: Tensor, blocks: Tensor, law: Law) -> Tensor:
    """The result, given order and blocks; differentiable in ``x`` and ``tau``."""
    wide = (law.sign * x).to(wide_dtype(x))
    over = tau.to(wide.dtype) if isinstance(tau, Tensor) else tau
    if law.number < 2:
        out = _ranks_of(torch.where(wide.isinf(), 0.0, wide).gather(-1, order), over, blocks, kl=law.number == 1)
        out = out - out.detach()[..., law.centre - 1 : law.centre] if law.centre else out
        out = torch.zeros_like(out).scatter(-1, order, out)
    else:
        out = _values_of(wide.gather(-1, order), over, blocks, kl=law.number == 3)
    out = (law.factor * out).to(wide.dtype if law.wide else x.dtype)
    if law.centre:
        out = torch.where(x.isinf(), x, out)
    lost = x.isnan().any(-1, keepdim=True)
    poison = torch.where(lost, torch.nan, 0.0).to(out.dtype)  # makes the row nan, and its gradients in x and tau
    return out * (1 + poison) + torch.where(lost, x, 0.0) * poison


def _ranks_of(x: Tensor, tau: Number, blocks: Tensor, kl: bool) -> Tensor:
    away = (x - block_first(x, blocks)) / tau  # within a block values are close to each other: their differences are small and exact
    places = _places(x)
    if kl:
        return block_sum(places, blocks) * torch.exp(away - block_logsumexp(away, blocks))
    return block_mean(places, blocks) + (away - block_mean(away, blocks))


def _values_of(x: Tensor, tau: Number, blocks: Tensor, kl: bool) -> Tensor:
    ramp = _places(x) / tau
    if kl:
        return block_logsumexp(x, blocks) + (ramp - block_logsumexp(ramp, blocks))
    return block_mean(x, blocks) + (ramp - block_mean(ramp, blocks))
