from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from khot.nn.experts import sizes
from khot.nn.routing import Routing, count
from khot.nn.topk_router import TopKRouter


class Mixture(NamedTuple):
    """The mixed outputs and the routing behind them."""

    values: Tensor
    routing: Routing


class _Plan(NamedTuple):
    """Places sorted by expert: the token and the weight of each, and where each expert's places end."""

    tokens: Tensor
    weights: Tensor
    ends: Tensor


@final
class MoE(nn.Module):
    """Mixture of experts: each token through the few experts that its router names.

    Tokens are sorted by expert. A stacked module such as :class:`khot.nn.StackedFeedForward` gets all rows at once; a list of modules is
    called one after the other, each on its own rows (the sizes are read from the device, so that this cannot be one graph).

    Args:
        router: who goes where.
        experts: a sequence of modules, one for each expert, or one module ``(rows, ends) -> rows``.
        capacity: an expert takes at most ``capacity`` times its even share; the places of smallest weight are dropped, and count as 0 in
            ``routing.weights``.

    Example:
        >>> moe = MoE(TopKRouter(dim=8, num_experts=4, k=2), [torch.nn.Linear(8, 8) for _ in range(4)])
        >>> y, routing = moe(torch.randn(5, 8))
        >>> y.shape, routing.load.sum()
        (torch.Size([5, 8]), tensor(10))
        >>> loss = y.square().mean() + 0.1 * routing.balance_loss() + 1e-3 * routing.z_loss()
    """

    def __init__(self, router: TopKRouter, experts: Sequence[nn.Module] | nn.Module, *, capacity: float | None = None) -> None:
        super().__init__()
        one = isinstance(experts, nn.Module) and not isinstance(experts, (nn.ModuleList, nn.Sequential))
        self.experts: nn.Module = experts if one else nn.ModuleList(experts)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        number = getattr(experts, "num_experts", router.num_experts) if one else len(experts)  # pyright: ignore[reportArgumentType]
        if number != router.num_experts:
            raise ValueError(f"there must be one expert for each of the router's {router.num_experts}, got {number}")
        if capacity is not None and not capacity > 0:
            raise ValueError(f"capacity must be positive, got {capacity}; None takes every token")
        self.router, self.capacity = router, capacity

    def forward(self, x: Tensor) -> Mixture:
        """``(..., dim) -> (..., out)`` and the routing."""
        routing = self.router.route(x)
        if self.capacity is not None and routing.choice == "token":
            routing = routing._replace(weights=_within(routing, self.capacity))
        plan = _plan(routing, sparse=self.capacity is not None or isinstance(self.experts, nn.ModuleList))
        rows = x.reshape(-1, x.shape[-1])
        out = self._run(rows.index_select(0, plan.tokens), plan.ends)
        mixed = torch.zeros(rows.shape[0], out.shape[-1], dtype=out.dtype, device=out.device)
        mixed = mixed.index_add(0, plan.tokens, out * plan.weights.unsqueeze(-1).to(out.dtype))
        return Mixture(mixed.view(*x.shape[:-1], out.shape[-1]), routing)

    def _run(self, rows: Tensor, ends: Tensor) -> Tensor:
        if not isinstance(self.experts, nn.ModuleList):
            return self.experts(rows, ends)
        parts = rows.split(sizes(ends))
        busy = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        return torch.cat(busy) if busy else self.experts[0](rows)

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}"


def _plan(routing: Routing, *, sparse: bool) -> _Plan:
    """``sparse`` leaves out the places of weight 0, which makes the shapes depend on the data."""
    indices, weights = routing.indices, routing.weights
    num_experts = routing.logits.shape[-1]
    if routing.choice == "expert":
        ends = torch.arange(1, num_experts + 1, device=indices.device) * indices.shape[-1]
        return _Plan(indices.flatten(), weights.flatten(), ends)
    experts, weights = indices.flatten(), weights.flatten()
    order = experts.argsort(stable=True)
    if sparse:
        order = order[weights.detach()[order] != 0]
    return _Plan(order // indices.shape[-1], weights[order], count(experts[order], num_experts).cumsum(0))


def _within(routing: Routing, capacity: float) -> Tensor:
    """The weights, 0 where an expert is full already; larger weights come first."""
    weights, experts = routing.weights.flatten(), routing.indices.flatten()
    num_experts = routing.logits.shape[-1]
    first = weights.detach().argsort(descending=True, stable=True)
    order = first[experts[first].argsort(stable=True)]
    counts = count(experts, num_experts)
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[experts[order]]
    keep = torch.zeros_like(experts).scatter(0, order, (place < math.ceil(capacity * len(order) / num_experts)).long())
    return (weights * keep).view_as(routing.weights)
