"""Products of a code that is zero nearly everywhere: what is not selected costs nothing, in the gradient too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


class Places(NamedTuple):
    """Where a matrix of ``shape`` is not zero: positions in the flat matrix in rising order, and their rows and columns."""

    flat: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]


def places(flat: Tensor, shape: tuple[int, int]) -> Places:
    """From flat positions in any order, each at most once."""
    flat = flat.sort().values
    rows = torch.div(flat, shape[1], rounding_mode="floor")
    return Places(flat, rows, flat - rows * shape[1], shape)


def entries(x: Tensor, weight: Tensor, product: Tensor, at: Places) -> Tensor:
    """``(x @ weight)[at]``, from a ``product`` that was computed without its gradient.

    Example:
        >>> x, weight = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> entries(x, weight, x @ weight, places(torch.tensor([3, 0]), (2, 2)))
        tensor([1., 4.])
    """
    return _Entries.apply(x, weight, product, at)  # pyright: ignore[reportReturnType]


def combine(values: Tensor, rows: Tensor, at: Places) -> Tensor:
    """``code @ rows`` for a code with these values at these places.

    Example:
        >>> combine(torch.tensor([1.0, 10.0]), torch.eye(2), places(torch.tensor([0, 3]), (2, 2)))
        tensor([[ 1.,  0.],
                [ 0., 10.]])
    """
    return _Combine.apply(values, rows, at)  # pyright: ignore[reportReturnType]


def dense(values: Tensor, at: Places) -> Tensor:
    """The code itself."""
    return values.new_zeros(at.shape[0] * at.shape[1]).index_put((at.flat,), values).view(at.shape)


class _Entries(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Tensor, at: Places) -> Tensor:
        ctx.save_for_backward(x, weight, *at[:3])
        ctx.shape = at.shape
        return product.reshape(-1).index_select(0, at.flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, flat, rows, columns = ctx.saved_tensors
        at = Places(flat, rows, columns, ctx.shape)
        return _times(grad, at, weight.T), _transposed_times(grad, at, x).T, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, at: Places) -> Tensor:
        ctx.save_for_backward(values, rows, *at[:3])
        ctx.shape = at.shape
        return _times(values, at, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        values, right, flat, rows, columns = ctx.saved_tensors
        at = Places(flat, rows, columns, ctx.shape)
        return _pairs(grad, right, at), _transposed_times(values, at, grad), None


def _times(values: Tensor, at: Places, right: Tensor) -> Tensor:
    """The sparse matrix times a dense one."""
    return _sums(values, at.rows, at.columns, right, at.shape[0])


def _transposed_times(values: Tensor, at: Places, right: Tensor) -> Tensor:
    order = at.columns.argsort(stable=True)
    return _sums(values[order], at.columns[order], at.rows[order], right, at.shape[1])


def _sums(values: Tensor, groups: Tensor, picks: Tensor, right: Tensor, count: int) -> Tensor:
    """For each group the sum of its picks among the rows of ``right``, times their values; ``groups`` is in rising order."""
    starts = torch.searchsorted(groups, torch.arange(count, device=groups.device))
    return F.embedding_bag(picks, right.contiguous(), starts, mode="sum", per_sample_weights=values)


def _pairs(left: Tensor, right: Tensor, at: Places, piece: int = 8192) -> Tensor:
    """The inner product of row i of ``left`` and row j of ``right`` for every place (i, j); in pieces that stay in cache."""
    parts = zip(at.rows.split(piece), at.columns.split(piece), strict=True)
    return torch.cat([torch.linalg.vecdot(left.index_select(0, i), right.index_select(0, j)) for i, j in parts])
