r"""Soft ranks and soft sorting: projections onto the permutahedron, each one sort and one isotonic regression.

With the values sorted, every block of the isotonic fit is solved by itself. Within a block the ranks are, about their mean, the values
over ``tau`` (``l2``), or their softmax times the places of the block (``kl``). So a row is told by its order and its blocks; the formula
on these is differentiable as often as one likes, and the native code is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._tensors import Number, wide_dtype
from khot.kernels.order import Law
from khot.primitives.isotonic import block_first, block_logsumexp, block_mean, block_sum, find_blocks
from khot.primitives.order import descending_order


def gradients(grad: Tensor, x: Tensor, items: Tensor, tau: Number, law: Law, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """The same by the formula, so that it can be differentiated itself."""
    again = torch.is_grad_enabled()
    fresh = items < 0
    order, blocks = torch.where(fresh, ~items, items).long(), fresh.long().cumsum(-1) - 1
    inputs = [value for value, need in zip((x, tau), needed, strict=False) if need and isinstance(value, Tensor)]
    with torch.enable_grad():
        out = formula(x, tau, order, blocks, law)
    found = iter(torch.autograd.grad(out, inputs, grad, create_graph=again, materialize_grads=True))
    return [next(found) if need else None for need in needed[:2]]


def order_and_blocks(x: Tensor, tau: Number, law: Law) -> tuple[Tensor, Tensor]:
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


def formula(x: Tensor, tau: Number, order: Tensor, blocks: Tensor, law: Law) -> Tensor:
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
        out = torch.where(x.isinf(), x.detach(), out)
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
