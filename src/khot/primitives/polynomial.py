"""Products of many polynomials at once, differentiable any number of times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function


def product(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
    r"""Coefficients ``start .. start + length - 1`` of the product of two polynomials.

    .. math:: c_i = \sum_j a_j b_{i-j}

    Coefficients run along the *first* dimension, so that every step is one multiply-add over contiguous rows. No subtraction is
    ever made: non-negative factors give coefficients that are right to a few units in the last place each.

    Args:
        a: ``(p, ...)``.
        b: ``(q, ...)``.
        start: first coefficient wanted; those below 0 or beyond the product are 0.
        length: how many.

    Example:
        >>> product(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), 0, 3)
        tensor([1., 5., 6.])
    """
    return _Product.apply(a, b, start, length)


def raw_product(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
    """:func:`product` without a derivative."""
    if a.shape[0] > b.shape[0]:
        a, b = b, a
    out = torch.empty((length, *b.shape[1:]), dtype=b.dtype, device=b.device)
    first = min(b.shape[0], length) if start == 0 else 0
    out[first:].zero_()
    for j, factor in enumerate(a.unbind(0)):
        # a_j b_i lands on coefficient i + j, that is on row i + j - start.
        low, high = max(0, start - j), min(b.shape[0], start + length - j)
        if j == 0 and first:
            torch.mul(factor, b[:first], out=out[:first])
        elif low < high:
            out[low + j - start : high + j - start].addcmul_(factor, b[low:high])
    return out


class _Product(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
        return raw_product(a, b, start, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        a, b, ctx.start, ctx.length = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A correlation is a product with the coefficients reversed.
        a, b = ctx.saved_tensors
        grad_a = product(grad, b.flip(0), b.shape[0] - 1 - ctx.start, a.shape[0]) if ctx.needs_input_grad[0] else None
        grad_b = product(grad, a.flip(0), a.shape[0] - 1 - ctx.start, b.shape[0]) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None

    @staticmethod
    def jvp(ctx: Any, move_a: Tensor | None, move_b: Tensor | None, *_: None) -> Tensor:
        a, b = ctx.saved_tensors
        move_a, move_b = (torch.zeros_like(x) if move is None else move for x, move in ((a, move_a), (b, move_b)))
        return product(move_a, b, ctx.start, ctx.length) + product(a, move_b, ctx.start, ctx.length)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor, start: int, length: int) -> tuple[Tensor, int]:
        def last(x: Tensor, dim: int | None) -> Tensor:
            return x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)

        out = product(last(a, in_dims[0]), last(b, in_dims[1]), start, length)
        return out, out.ndim - 1
