"""Experts behind a router: rows sorted by expert, one product for all of them where that is possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ALIGNED = 16  # bytes, which the strides of a grouped product must be multiples of


@final
class StackedFeedForward(nn.Module):
    r"""``num_experts`` feed-forward networks of one shape in stacked weights, each applied to its own rows.

    .. math:: y = W_\text{down}\,(\phi(W_\text{gate}\, x) \odot W_\text{up}\, x)

    Args:
        num_experts: how many networks.
        dim: width of a row.
        hidden: width inside.
        activation: applied to the gate.
        gated: ``False`` leaves out the product: :math:`W_\text{down}\,\phi(W_\text{up}\,x)`.

    Example:
        >>> experts = StackedFeedForward(num_experts=2, dim=8, hidden=16)
        >>> experts(torch.randn(5, 8), torch.tensor([2, 5])).shape  # rows 0-1 for the first expert, 2-4 for the second
        torch.Size([5, 8])
    """

    def __init__(
        self, num_experts: int, dim: int, hidden: int, *, activation: Callable[[Tensor], Tensor] = F.silu, gated: bool = True
    ) -> None:
        super().__init__()
        if min(num_experts, dim, hidden) < 1:
            raise ValueError(f"num_experts, dim and hidden must be at least 1, got {num_experts}, {dim} and {hidden}")
        self.num_experts, self.dim, self.hidden, self.activation, self.gated = num_experts, dim, hidden, activation, gated
        self.up = nn.Parameter(_uniform(num_experts, dim, hidden * (2 if gated else 1)))
        self.down = nn.Parameter(_uniform(num_experts, hidden, dim))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows (N, dim)`` sorted by expert, ``ends (E,)``: where each expert's rows end."""
        inner = grouped_matmul(rows, self.up, ends)
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(inner)
        return grouped_matmul(inner, self.down, ends)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, dim={self.dim}, hidden={self.hidden}, gated={self.gated}"


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``rows[start:end] @ weights[e]`` for every expert: one call where torch has it for this dtype and shape, else one each."""
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    # An operator of our own, as torch.compile takes a grouped product in bfloat16 only and cannot take the loop.
    return _operator(rows.to(weights.dtype), weights, ends)


@torch.library.custom_op("khot::grouped_matmul", mutates_args=())
def _operator(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _groupable(rows, weights):
        return F.grouped_mm(rows.contiguous(), weights, offs=ends.to(torch.int32))
    return torch.cat([part @ weight for part, weight in zip(rows.split(sizes(ends)), weights, strict=True)])


@torch.library.custom_op("khot::grouped_outer", mutates_args=())
def _outer(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    """``rows[start:end].T @ grads[start:end]`` for every expert: the gradient of the weights."""
    pairs = zip(rows.split(sizes(ends)), grads.split(sizes(ends)), strict=True)
    return torch.stack([row.mT @ grad for row, grad in pairs])


@_operator.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[-1])


@_outer.register_fake
def _(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[-1], grads.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    to_rows, to_weights, _ = ctx.needs_input_grad
    below = _operator(grad.contiguous(), weights.mT.contiguous(), ends) if to_rows else None
    return below, _outer(rows, grad, ends) if to_weights else None, None


_operator.register_autograd(_backward, setup_context=_save)


def _groupable(rows: Tensor, weights: Tensor) -> bool:
    aligned = all(size * rows.element_size() % _ALIGNED == 0 for size in weights.shape[1:])
    return hasattr(F, "grouped_mm") and rows.dtype in (torch.float32, torch.bfloat16) and aligned


def sizes(ends: Tensor) -> list[int]:
    """How many rows each expert has; read from the device."""
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()


def _uniform(num: int, inside: int, outside: int) -> Tensor:
    return torch.empty(num, inside, outside).uniform_(-1, 1) / math.sqrt(inside)
