from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from khot.distributed.exchange import Exchange, gather_rows
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
        group: the processes that the experts are spread over, e.g. ``torch.distributed.group.WORLD``; ``None`` where all experts are here.
            Rank ``r`` of ``W`` passes its own ``num_experts / W`` experts, those from ``r * num_experts / W`` on, and routes its own
            tokens. Values and gradients are those of one process with all tokens; the router is the same on every rank, and its
            gradient is to be summed over them.

    Example:
        >>> moe = MoE(TopKRouter(dim=8, num_experts=4, k=2), [torch.nn.Linear(8, 8) for _ in range(4)])
        >>> y, routing = moe(torch.randn(5, 8))
        >>> y.shape, routing.load.sum()
        (torch.Size([5, 8]), tensor(10))
        >>> loss = y.square().mean() + 0.1 * routing.balance_loss() + 1e-3 * routing.z_loss()
    """

    def __init__(
        self, router: TopKRouter, experts: Sequence[nn.Module] | nn.Module, *, capacity: float | None = None, group: Any = None
    ) -> None:
        super().__init__()
        one = isinstance(experts, nn.Module) and not isinstance(experts, (nn.ModuleList, nn.Sequential))
        self.experts: nn.Module = experts if one else nn.ModuleList(experts)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        ranks = 1 if group is None else dist.get_world_size(group)
        number = getattr(experts, "num_experts", router.num_experts // ranks) if one else len(experts)  # pyright: ignore[reportArgumentType]
        if number * ranks != router.num_experts:
            where = f" and {ranks} ranks" if ranks > 1 else ""
            raise ValueError(f"there must be one expert for each of the router's {router.num_experts}, got {number}{where}")
        wide, given = getattr(experts, "dim", None), getattr(router, "dim", None)  # other routers and experts need not say it
        if one and None not in (wide, given) and wide != given:
            raise ValueError(f"the experts take rows of {wide} numbers and the router of {given}")
        if group is not None and router.choice != "token":
            raise ValueError("where experts choose tokens, they choose among all of them; spread experts over a group with choice='token'")
        if capacity is not None and not capacity > 0:
            raise ValueError(f"capacity must be positive, got {capacity}; None takes every token")
        self.router, self.capacity, self.group = router, capacity, group

    def forward(self, x: Tensor) -> Mixture:
        """``(..., dim) -> (..., out)`` and the routing."""
        routing = self.router.route(x) if self.group is None else self.router.route(x, self.group)
        if self.capacity is not None and routing.choice == "token":
            routing = routing._replace(weights=routing.weights * self._kept(routing))
        plan = _plan(routing, sparse=self.capacity is not None or self.group is not None or isinstance(self.experts, nn.ModuleList))
        rows = x.reshape(-1, x.shape[-1])
        out = self._dispatch(rows.index_select(0, plan.tokens), plan.ends)
        mixed = torch.zeros(rows.shape[0], out.shape[-1], dtype=out.dtype, device=out.device)
        mixed = mixed.index_add(0, plan.tokens, out * plan.weights.unsqueeze(-1).to(out.dtype))
        return Mixture(mixed.view(*x.shape[:-1], out.shape[-1]), routing)

    def _kept(self, routing: Routing) -> Tensor:
        """1 for the places that fit the experts' capacity, 0 for the others."""
        assert self.capacity is not None
        weights, indices, number = routing.weights.detach(), routing.indices, routing.logits.shape[-1]
        if self.group is None:
            return _within(weights, indices, number, self.capacity)
        (all_weights, start), (all_indices, _) = gather_rows(weights, self.group), gather_rows(indices, self.group)
        return _within(all_weights, all_indices, number, self.capacity)[start : start + len(weights)]

    def _dispatch(self, rows: Tensor, ends: Tensor) -> Tensor:
        """The rows, sorted by expert, through the experts, wherever those are."""
        if self.group is None:
            return self._run(rows, ends)
        exchange = Exchange(torch.diff(ends, prepend=ends.new_zeros(1)), self.group)
        return exchange.back(self._run(exchange.send(rows), exchange.ends))

    def _run(self, rows: Tensor, ends: Tensor) -> Tensor:
        if not isinstance(self.experts, nn.ModuleList):
            return self.experts(rows, ends)
        parts = rows.split(sizes(ends))
        # Not zip(strict=True): with a list of modules it breaks Dynamo of torch 2.6.
        busy = [self.experts[i](part) for i, part in enumerate(parts) if len(part)]
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


def _within(weights: Tensor, indices: Tensor, num_experts: int, capacity: float) -> Tensor:
    """1 where a place is kept, 0 where its expert is full already; larger weights come first."""
    experts = indices.flatten()
    first = weights.flatten().argsort(descending=True, stable=True)
    order = first[experts[first].argsort(stable=True)]
    counts = count(experts, num_experts)
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[experts[order]]
    keep = torch.zeros_like(experts).scatter(0, order, (place < math.ceil(capacity * len(order) / num_experts)).long())
    return keep.view_as(weights)
