"""Rows sent to the ranks that work on them, and their results sent back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from khot.distributed.traffic import all_gather, all_reduce, counted


class _AllToAll(Function):
    """``sizes[r]`` rows to rank ``r`` and ``others[r]`` rows from it; the gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], others: list[int], group: Any) -> Tensor:
        ctx.rest = sizes, others, group
        out = rows.new_empty((sum(others), *rows.shape[1:]))
        sent = rows.contiguous()
        counted("all_to_all", sent, lambda: dist.all_to_all_single(out, sent, others, sizes, group=group))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sizes, others, group = ctx.rest
        return _AllToAll.apply(grad, others, sizes, group), None, None, None


class Exchange:
    """Experts in blocks over the ranks of a group: rows sorted by expert go to the expert's rank, results come back.

    Args:
        counts: ``(E,)``, how many rows of this rank each of all experts has.
        group: the process group; rank ``r`` of ``W`` has the experts from ``r E / W`` on.
    """

    def __init__(self, counts: Tensor, group: Any) -> None:
        world = dist.get_world_size(group)
        arriving = torch.empty_like(counts)
        counted("all_to_all", counts, lambda: dist.all_to_all_single(arriving, counts.contiguous(), group=group))
        table = arriving.view(world, -1)  # (ranks, experts here)
        self.group, self.sent, self.received = group, counts.view(world, -1).sum(1).tolist(), table.sum(1).tolist()
        self.ends = table.sum(0).cumsum(0)
        expert = torch.arange(table.shape[1], dtype=torch.long, device=counts.device).repeat(world).repeat_interleave(table.flatten())
        # Stable: rows of one expert stay in the order of the ranks, and of each rank's rows, as if all tokens were in one process.
        self.order = expert.argsort(stable=True)

    def send(self, rows: Tensor) -> Tensor:
        """The rows of all ranks for the experts here, sorted by expert."""
        return _AllToAll.apply(rows, self.sent, self.received, self.group).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """What the experts made of this rank's rows, in the order in which they were sent."""
        home = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(self.order), dtype=torch.long, device=rows.device))
        return _AllToAll.apply(rows.index_select(0, home), self.received, self.sent, self.group)


def gather_rows(values: Tensor, group: Any) -> tuple[Tensor, int]:
    """The rows of all ranks one behind the other, without gradient, and where those of this rank begin."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = torch.zeros(world, dtype=torch.long, device=values.device)
    counts[rank] = len(values)
    all_reduce(counts, group)
    lengths = counts.tolist()
    padded = values.detach().new_zeros((max(lengths), *values.shape[1:]))
    padded[: len(values)] = values.detach()
    parts = [torch.empty_like(padded) for _ in range(world)]
    all_gather(parts, padded, group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]), sum(lengths[:rank])


def group_spread(scores: Tensor, group: Any) -> Tensor:
    """The standard deviation of the finite scores of all ranks; a number without gradient, 0 where all of them are equal."""
    x = scores.detach().double()
    there = x.isfinite()
    first = torch.stack((there.sum().double(), torch.where(there, x, 0.0).sum()))
    all_reduce(first, group)
    square = torch.where(there, x - first[1] / first[0].clamp(min=1), 0.0).square().sum()
    all_reduce(square, group)
    return (square / first[0].clamp(min=1)).sqrt()
