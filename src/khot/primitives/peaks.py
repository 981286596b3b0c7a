r"""Rows of a matrix that peak at the largest scores in turn, in blocks that stay in cache.

.. math:: P_{ij} \propto e^{-c (x_{(i)} - x_j)^2} \text{ over the items that have not won yet}

The winners of a block are taken out behind it by a score of infinity, and within it by -inf below the diagonal of the small matrix of its
winners: a mask over all items takes several times as long as the softmax. With :math:`D = P \circ (G - \sum_j P G)` the gradient in
:math:`x_{(i)}` is :math:`-2c \sum_j D_{ij} (x_{(i)} - x_j)`, and the opposite goes to :math:`x_j`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot.primitives.again import must_show, vjp_of

_BLOCK = 1 << 16  # entries of a block whose temporaries stay in cache


class Peaks(Function):
    """``(rows, n)`` scores with the places of their ``k`` largest to ``(rows, k, n)``, or to ``(rows, n)`` summed over the winners."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, index: Tensor, c: float, summed: bool, plain: Callable[[Tensor], Tensor]) -> Tensor:
        k, n = index.shape[-1], scores.shape[-1]
        out = torch.zeros_like(scores) if summed else scores.new_empty((len(scores), k, n))
        for row, x in enumerate(scores):
            for some, p in _blocks(x, index[row], c, None if summed else out[row]):
                if summed:
                    out[row] += p.sum(0)
                del some
        ctx.save_for_backward(scores, index, *(() if summed else (out,)))
        ctx.rest = c, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, index, *kept = ctx.saved_tensors
        c, plain = ctx.rest
        if must_show(grad):
            return vjp_of(plain, scores, grad), None, None, None, None
        total = torch.zeros_like(scores)
        for row, x in enumerate(scores):
            g = grad[row] if kept else grad[row].expand(index.shape[-1], -1)
            blocks = _kept(kept[0][row]) if kept else _blocks(x, index[row], c, None)
            total[row] = _gradient(x, index[row], c, g, blocks)
        return total, None, None, None, None


def _step(n: int) -> int:
    return max(1, _BLOCK // n)


def _kept(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    step = _step(rows.shape[-1])
    return ((slice(begin, begin + step), rows[begin : begin + step]) for begin in range(0, len(rows), step))


def _blocks(x: Tensor, index: Tensor, c: float, out: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of winners with their rows, in ``out`` or in a buffer that the next block overwrites."""
    k, n = len(index), len(x)
    step, left, top = _step(n), x.clone(), x[index].unsqueeze(-1)
    z = x.new_empty((min(step, k), n))
    own = torch.full((len(z), len(z)), -torch.inf, dtype=x.dtype, device=x.device).tril_(-1)
    for begin in range(0, k, step):
        some = slice(begin, min(k, begin + step))
        size = some.stop - begin
        torch.sub(top[some], left, out=z[:size]).square_().mul_(-c).index_add_(1, index[some], own[:size, :size])
        p = z[:size] if out is None else out[some]
        torch.softmax(z[:size], -1, out=p)
        yield some, p
        left.index_fill_(0, index[some], torch.inf)


def _gradient(x: Tensor, index: Tensor, c: float, grad: Tensor, blocks: Iterator[tuple[slice, Tensor]]) -> Tensor:
    """The gradient in one row of scores."""
    total, own, top = torch.zeros_like(x), torch.empty_like(x[index]), x[index].unsqueeze(-1)
    for some, p in blocks:
        d = p * grad[some]
        d.addcmul_(p, d.sum(-1, keepdim=True), value=-1).mul_(top[some] - x)
        own[some] = d.sum(-1)
        total += d.sum(0)
    return total.index_add_(0, index, own, alpha=-1).mul_(2 * c)
