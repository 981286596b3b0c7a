"""Weighted sums of rows that go to few places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import Function

from khot.registry import readable

_LARGE = 1 << 16  # entries of x from which sorting the places pays


def collect(x: Tensor, weight: Tensor, place: Tensor, k: int) -> Tensor:
    r"""``out_p`` is the sum of ``weight_i x_i`` over the items with ``place_i = p``.

    Args:
        x: ``(..., n, d)``.
        weight: ``(..., n)``.
        place: ``(..., n)`` integers below ``k``.
        k: how many places.

    Returns:
        ``(..., k, d)``.

    Example:
        >>> collect(torch.eye(3), torch.tensor([0.5, 1.0, 0.5]), torch.tensor([1, 0, 1]), 2)
        tensor([[0.0000, 1.0000, 0.0000],
                [0.5000, 0.0000, 0.5000]])
    """
    if x.numel() >= _LARGE and readable(x) and readable(weight) and forward_ad._current_level < 0:
        return _Bags.apply(x, weight, place, k)
    out = torch.zeros(*x.shape[:-2], k, x.shape[-1], dtype=x.dtype, device=x.device)
    return out.scatter_add(-2, place.unsqueeze(-1).expand_as(x), weight.unsqueeze(-1) * x)


def _flat_place(place: Tensor, k: int) -> Tensor:
    rows = place.reshape(-1, place.shape[-1])
    return (rows + k * torch.arange(rows.shape[0], device=place.device).unsqueeze(-1)).flatten()


class _Bags(Function):
    """Each place as a bag of items: one pass over ``x`` and no temporary of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(x, weight, place)
        batch, d = x.shape[:-2], x.shape[-1]
        by_place = _flat_place(place, k).sort(stable=True)
        starts = torch.searchsorted(by_place.values, torch.arange(k * batch.numel(), device=x.device))
        weights = weight.reshape(-1)[by_place.indices]
        bags = torch.nn.functional.embedding_bag(
            by_place.indices, x.reshape(-1, d), starts, mode="sum", per_sample_weights=weights.to(x.dtype)
        )
        return bags.view(*batch, k, d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, place = ctx.saved_tensors
        sent = grad.reshape(-1, grad.shape[-1]).index_select(0, _flat_place(place, grad.shape[-2])).view(x.shape)
        grad_x = weight.unsqueeze(-1) * sent if ctx.needs_input_grad[0] else None
        grad_weight = (x * sent).sum(-1) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None
