"""Weighted sums over bags of items."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot import kernels
from khot._tensors import in_forward_mode, readable


def collect(x: Tensor, weight: Tensor, items: Tensor) -> Tensor:
    r"""The sum of ``weight_s x[items_s]`` over every bag.

    Args:
        x: ``(..., n, d)``.
        weight: ``(..., k, s)``.
        items: ``(..., k, s)`` integers below ``n``. An item may stand in one bag only, if more than once.

    Returns:
        ``(..., k, d)``.

    Example:
        >>> collect(torch.eye(3), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1, 1], [0, 2]]))
        tensor([[0.0000, 1.0000, 0.0000],
                [0.5000, 0.0000, 0.5000]])
    """
    if readable(x) and readable(weight) and not in_forward_mode() and x.shape[-1]:
        native = kernels.pick("bags", x, weight)
        if native is not None and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
            return native.forward(x, weight, items)
        return _Bags.apply(x, weight, items, native)
    index = items.flatten(-2).unsqueeze(-1)
    rows = x.gather(-2, index.expand(*index.shape[:-1], x.shape[-1])).unflatten(-2, items.shape[-2:])
    return (weight.unsqueeze(-2) @ rows).squeeze(-2)


def _flat(index: Tensor, n: int) -> Tensor:
    """Indices below ``n`` in each of the rows, as indices into all rows one after the other."""
    rows = index.reshape(-1, index.shape[-2] * index.shape[-1])
    return rows + n * torch.arange(rows.shape[0], dtype=torch.long, device=index.device).unsqueeze(-1)


class _Bags(Function):
    """One pass over ``x`` without a temporary of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, items: Tensor, native: Any) -> Tensor:
        ctx.native = native
        ctx.save_for_backward(x, weight, items)
        if native is not None:
            return native.forward(x, weight, items)
        bags = _flat(items, x.shape[-2]).view(-1, items.shape[-1])
        table, weights = x.reshape(-1, x.shape[-1]), weight.reshape(bags.shape)
        out = torch.nn.functional.embedding_bag(bags, table, mode="sum", per_sample_weights=weights)
        return out.view(*items.shape[:-1], x.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, items = ctx.saved_tensors
        learns_x, learns_weight, *_ = ctx.needs_input_grad
        if (
            ctx.native is not None
            and not torch.is_grad_enabled()
            and not in_forward_mode()
            and kernels.pick("bags", x, weight, grad) is ctx.native
        ):
            return *ctx.native.backward(grad, x, weight, items, grad_x=learns_x, grad_weight=learns_weight), None, None
        k, s = items.shape[-2:]
        flat = _flat(items, x.shape[-2]).flatten()
        grad_x = grad_weight = None
        if learns_x:
            bag = torch.arange(grad[..., 0].numel(), dtype=torch.long, device=x.device).repeat_interleave(s)
            place = torch.zeros(x[..., 0].numel(), dtype=torch.long, device=x.device).scatter(0, flat, bag)
            share = torch.zeros(place.shape, dtype=x.dtype, device=x.device).scatter_add(0, flat, weight.flatten())
            grad_x = share.view(*x.shape[:-1], 1) * grad.reshape(-1, grad.shape[-1]).index_select(0, place).view(x.shape)
        if learns_weight:
            rows = x.reshape(-1, x.shape[-1]).index_select(0, flat).view(*items.shape[:-2], k, s, x.shape[-1])
            grad_weight = (rows @ grad.unsqueeze(-1)).squeeze(-1)
        return grad_x, grad_weight, None, None
