"""Products of many polynomials at once, differentiable any number of times, forwards and backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import in_forward_mode, in_transform, is_bare, is_recorded
from khot.primitives.operators import define, derive


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
    if is_recorded() and not in_transform():  # one operator: a compiler must not unroll the loop over coefficients
        return torch.ops.khot.polynomial_product(a, b, start, length)
    if in_forward_mode():  # PyTorch does not nest the jvp of a Function: the second derivative would be wrong
        return _product_of_copies(a, b, start, length)
    return _Product.apply(a, b, start, length)


def raw_product(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
    """:func:`product` without a derivative."""
    if a.shape[0] > b.shape[0]:
        a, b = b, a
    if not (is_bare(a) and is_bare(b)):
        return _product_of_copies(a, b, start, length)
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


def _product_of_copies(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
    """The same without writing in place, for forward mode and for gradients in batches; it has the derivatives of its parts."""
    if a.shape[0] > b.shape[0]:
        a, b = b, a
    low, high = max(0, a.shape[0] - 1 - start), max(0, start + length - b.shape[0])
    wide = torch.cat((b.new_zeros((low, *b.shape[1:])), b, b.new_zeros((high, *b.shape[1:]))))
    total = b.new_zeros((length, *b.shape[1:]))
    for j, factor in enumerate(a.unbind(0)):
        total = total + factor * wide.narrow(0, low + start - j, length)
    return total


class _Product(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
        return raw_product(a, b, start, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        a, b, ctx.start, ctx.length = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A correlation is a product with the coefficients reversed.
        a, b = ctx.saved_tensors
        grad_a = product(grad, b.flip(0), b.shape[0] - 1 - ctx.start, a.shape[0]) if ctx.needs_input_grad[0] else None
        grad_b = product(grad, a.flip(0), a.shape[0] - 1 - ctx.start, b.shape[0]) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor, start: int, length: int) -> tuple[Tensor, int]:
        def last(x: Tensor, dim: int | None) -> Tensor:
            return x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)

        out = product(last(a, in_dims[0]), last(b, in_dims[1]), start, length)
        return out, out.ndim - 1


def _fake(a: Tensor, b: Tensor, start: int, length: int) -> Tensor:
    return b.new_empty((length, *b.shape[1:]))


_NAME = define("polynomial_product(Tensor a, Tensor b, SymInt start, SymInt length) -> Tensor", raw_product, _fake)
derive(_NAME, _Product.backward, _Product.setup_context)
