"""What crosses between processes: sums of columns, and a few columns of every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from khot.distributed.traffic import all_gather, all_reduce
from khot.kernels import shard as _registered  # noqa: F401  registers itself
from khot.primitives.threshold.rows import LOCAL, Rows, wide_sum

# Rows of at most so many items, counted with what pads the shards to one length, are fetched whole: one all-gather costs less than the
# rounds of a search, and rows of few items need the most rounds.
SHORT = 1024


class Total(Function):
    """The sum over ranks, one quantity that all of them know: its gradient is the same everywhere and is that of every term."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        out = part.clone(memory_format=torch.contiguous_format)
        if out.numel():
            all_reduce(out, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Shared(Function):
    """One quantity handed to every rank: its gradient is the sum of what the ranks found. The adjoint of :class:`Total`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Shared.apply(Total.apply(grad, ctx.group), ctx.group), None


@dataclass(frozen=True)
class Wire:
    """The processes that share the rows.

    Attributes:
        group: the process group.
        rank: this process's place in it.
        lengths: how many items of a row every rank has.
        seed: a random number that all ranks know, drawn by the first.
    """

    group: Any
    rank: int
    lengths: tuple[int, ...]
    seed: int

    @property
    def length(self) -> int:
        """How many items a row has in all."""
        return sum(self.lengths)

    @property
    def offset(self) -> int:
        """The place in the whole row of the first item here."""
        return sum(self.lengths[: self.rank])

    @property
    def alone(self) -> bool:
        return len(self.lengths) == 1

    @property
    def rows(self) -> Rows:
        """The reductions over rows that all ranks share; all sums of one call go out as one all-reduce."""
        if self.alone:
            return LOCAL
        gather = self.whole if len(self.lengths) * max(self.lengths) <= SHORT else None
        return Rows(
            sums=self._sums,
            places=len(self.lengths),
            length=self.length,
            across=self._across,
            gather=gather,
            start=self.offset,
            shared=self._shared,
        )

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks, differentiable."""
        return part if self.alone else Total.apply(part, self.group)

    def gather(self, part: Tensor) -> Tensor:
        """The tensors of all ranks, stacked in front; they have one shape. Without gradient."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in self.lengths]
        if part.numel():
            all_gather(parts, part.contiguous(), self.group)
        return torch.stack(parts)

    def whole(self, part: Tensor) -> Tensor:
        """The whole rows, without gradient."""
        most = max(self.lengths)
        padded = torch.nn.functional.pad(part.detach(), (0, most - part.shape[-1]))
        return torch.cat([one[..., :n] for one, n in zip(self.gather(padded), self.lengths, strict=True)], -1)

    def _sums(self, *values: Tensor) -> tuple[Tensor, ...]:
        return self._across(*(wide_sum(value) for value in values))

    def _across(self, *columns: Tensor) -> tuple[Tensor, ...]:
        return self.total(torch.stack(columns)).unbind(0)

    def _shared(self, column: Tensor) -> Tensor:
        return _Shared.apply(column, self.group)


def name_of(group: Any) -> str:
    """The name by which an operator knows a process group."""
    return (dist.group.WORLD if group is None else group).group_name  # pyright: ignore[reportOptionalMemberAccess]
