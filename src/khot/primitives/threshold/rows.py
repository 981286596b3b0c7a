"""The reductions over a row, which the search takes as an argument: a row may be spread over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._record import record
from khot._tensors import readable, wide_dtype

_RUN = 32  # float32 numbers added before going on in float64
CACHE = 1 << 16  # numbers in a piece whose temporaries stay in the cache and cost no new pages: those cost more than the arithmetic
_DIGIT = 4  # bits of the k-th largest that are decided by one reduction
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@record
class Rows:
    """The reductions over a row.

    Attributes:
        sums: several ``(..., n)`` at once, each to a ``(..., 1)`` column in float64 (where the device has it). The search calls it
            once per round, so that a row spread over processes costs one all-reduce per round.
        kth: the ``rank``-th largest of every row, ``rank`` a ``(..., 1)`` column of whole numbers; without it, it is counted for with
            ``sums`` alone.
        local: the row is all here: a part of it may stand for it, and it may be taken piece by piece.
        places: over how many places a row is spread; a sum over them rounds once more for each.
        length: how many items a row has in all places, where that is known without a reduction.
        across: adds columns of which every place has its part over the places; for sums that native code took.
        gather: fetches the whole row, where it is so short that this is cheaper than a search together; the part here begins at ``start``.
        shared: marks a column that every place has the same copy of, where it meets the items of one place: going back, what the
            places found is added up.
    """

    sums: Callable[..., tuple[Tensor, ...]]
    kth: Callable[[Tensor, Tensor], Tensor] | None = None
    local: bool = False
    places: int = 1
    length: int | None = None
    across: Callable[..., tuple[Tensor, ...]] = lambda *columns: columns
    gather: Callable[[Tensor], Tensor] | None = None
    start: int = 0
    shared: Callable[[Tensor], Tensor] = lambda column: column

    def rough(self, *values: Tensor) -> tuple[Tensor, ...]:
        """:attr:`sums`, where a sum in the values' own dtype will do."""
        if self.local:
            return tuple(value.sum(-1, keepdim=True) for value in values)
        return tuple(total.to(value.dtype) for total, value in zip(self.sums(*values), values, strict=True))

    def size(self, x: Tensor) -> Tensor:
        """How many items a row has, as a ``(..., 1)`` column."""
        length = self.known_length(x)
        if length is None:
            return self.sums(torch.ones_like(x))[0]
        return torch.full((*x.shape[:-1], 1), float(length), dtype=wide_dtype(x), device=x.device)

    def known_length(self, x: Tensor) -> int | None:
        """How many items a row has, or ``None`` where only a reduction can tell."""
        return x.shape[-1] if self.local else self.length

    def empty(self, x: Tensor) -> bool:
        """Whether there are no rows, or rows that have no item in any place. All places come to the same answer."""
        return 0 in x.shape[:-1] or self.known_length(x) == 0

    def largest(self, x: Tensor, rank: Tensor) -> Tensor:
        """The ``rank``-th largest of every row."""
        return count_kth(x, rank, self.sums) if self.kth is None else self.kth(x, rank)


def wide_sum(values: Tensor, free: Tensor | None = None) -> Tensor:
    """Sum in float64, where the device has it: n terms of rounding error would show in the sum otherwise.

    A long float32 row is first added up in runs of ``_RUN``, as a sum with another dtype copies its input on the CPU. For short rows
    ``free``, a buffer like ``values``, holds that copy.
    """
    n = values.shape[-1]
    if free is not None and values.dtype == torch.float32 and n % 2 == 0 and n < _RUN * _RUN:
        wide = free.view(torch.float64)
        first, second = (wide.copy_(half).sum(-1, keepdim=True) for half in values.split(n // 2, -1))
        return first.add_(second)
    if values.dtype != torch.float32 or not readable(values) or n < _RUN * _RUN:  # no guard on the length while a graph is traced
        return values.sum(-1, keepdim=True, dtype=wide_dtype(values))
    even = n - n % _RUN
    if even < n:
        return wide_sum(values[..., :even]) + values[..., even:].sum(-1, keepdim=True, dtype=wide_dtype(values))
    return values.unflatten(-1, (_RUN, -1)).sum(-2).sum(-1, keepdim=True, dtype=wide_dtype(values))


def sort_kth(x: Tensor, rank: Tensor) -> Tensor:
    """The ``rank``-th largest of every row by a selection where all rows ask for the same rank, else by a sort."""
    if readable(rank) and rank.numel() and bool((rank == rank.flatten()[0]).all()):
        return x.kthvalue(x.shape[-1] + 1 - int(rank.flatten()[0]), -1, keepdim=True).values
    return x.sort(-1, descending=True).values.gather(-1, rank.long() - 1)


def count_kth(x: Tensor, rank: Tensor, sums: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """The ``rank``-th largest of every row, found from the top by ``_DIGIT`` bits at a time, with one reduction each."""
    keys = order(x)
    bits = 8 * x.element_size()
    found = torch.full_like(rank, torch.iinfo(keys.dtype).min, dtype=keys.dtype)
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        counts = sums(*(keys >= found + (digit << shift) for digit in range(1, 1 << _DIGIT)))
        reached = sum((count >= rank).to(keys.dtype) for count in counts)
        found = found + (reached << shift)
    return unorder(found, x.dtype)


LOCAL = Rows(sums=lambda *values: tuple(wide_sum(value) for value in values), kth=sort_kth, local=True)


_resolvers: list[Callable[..., Rows]] = []


def resolves(resolver: Callable[..., Rows]) -> Callable[..., Rows]:
    """File ``resolver(places, x, k, tau)``, which knows the rows that are spread over the places of a name."""
    _resolvers.append(resolver)
    return resolver


def rows_of(places: str, *arguments: Any) -> Rows:
    """What an operator's ``places`` stands for: nothing for a row that is all here, else the name of where it is spread over."""
    return _resolvers[0](places, *arguments) if places else LOCAL


def order(value: Tensor) -> Tensor:
    """The place of a number among all numbers of its dtype, as an integer."""
    bits = value.contiguous().view(_INTEGER[value.dtype])
    return torch.where(bits < 0, torch.iinfo(bits.dtype).min - bits, bits)


def unorder(place: Tensor, dtype: torch.dtype) -> Tensor:
    """The number at a place; the inverse of :func:`order`."""
    return torch.where(place < 0, torch.iinfo(place.dtype).min - place, place).view(dtype)
