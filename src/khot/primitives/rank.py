"""Soft ranks and soft sorting of rows: the native code, the operator or the formula, whichever takes the tensors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.compiler import is_compiling

from khot import kernels
from khot._tensors import Number, column, in_forward_mode, wide_dtype
from khot.kernels.order import Law
from khot.primitives.rank_formula import formula, gradients, order_and_blocks
from khot.primitives.rank_operator import solve as solve_by_operator

Regularization = Literal["l2", "kl"]


def ranks(x: Tensor, tau: Number, regularization: Regularization, *, descending: bool = False, wide: bool = False) -> Tensor:
    """Soft ranks of ``(..., n)`` from 1 to n.

    Args:
        x: infinite values rank at the ends, a nan makes its own row nan.
        tau: a number or ``(...)``.
        regularization: ``"l2"`` or ``"kl"``.
        descending: rank 1 is the largest.
        wide: return float64, where the device has it: the ranks of long rows need the digits.
    """
    return _solve(x, tau, Law(_number(regularization), -1.0 if descending else 1.0, 1.0, wide=wide))


def heights(scores: Tensor, k: int, tau: Number, regularization: Regularization) -> Tensor:
    """Minus the descending ranks, about that of the k-th largest: what lies near it keeps its digits. Infinite scores stay."""
    n = scores.shape[-1]
    return _solve(scores, tau, Law(_number(regularization), -1.0, -1.0, centre=n - max(k, 1) + 1))


def sorted_values(x: Tensor, tau: Number, regularization: Regularization, *, descending: bool = False) -> Tensor:
    """Soft sort of ``(..., n)``. Ascending is the negative of the descending sort of the negated values."""
    sign = 1.0 if descending else -1.0
    return _solve(x, tau, Law(2 + _number(regularization), sign, sign))


def check_regularization(regularization: str) -> None:
    if regularization not in ("l2", "kl"):
        raise ValueError(f"regularization must be 'l2' or 'kl', got {regularization!r}")


def _number(regularization: Regularization) -> int:
    return int(regularization == "kl")


def _solve(x: Tensor, tau: Number, law: Law) -> Tensor:
    if x.shape[-1] == 0:
        return x.to(wide_dtype(x) if law.wide else x.dtype)
    tau = column(tau, x)
    if is_compiling() and not in_forward_mode():
        return solve_by_operator(x, tau, law)
    native = None if in_forward_mode() else kernels.pick("ranks", x, tau)
    if native is None:
        return formula(x, tau, *order_and_blocks(x, tau, law), law)
    if torch.is_grad_enabled() and (x.requires_grad or isinstance(tau, Tensor) and tau.requires_grad):
        return _Native.apply(x, tau, law, native)
    return native.forward(x, tau, law)[0]


class _Native(Function):
    """Keeps the values, their order and where blocks begin; a gradient that is differentiated again goes through the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tau: Number, law: Law, native: Any) -> Tensor:
        out, items = native.forward(x, tau, law)
        learns_tau = isinstance(tau, Tensor)
        ctx.law, ctx.native, ctx.tau = law, native, None if learns_tau else tau
        ctx.save_for_backward(x, items, *((tau,) if learns_tau else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, items, *rest = ctx.saved_tensors
        tau = rest[0] if rest else ctx.tau
        if torch.is_grad_enabled() or in_forward_mode() or kernels.pick("ranks", x, tau, grad) is not ctx.native:
            return *gradients(grad, x, items, tau, ctx.law, ctx.needs_input_grad), None, None
        in_x, in_tau = ctx.native.backward(grad, x, items, tau, ctx.law)
        return in_x, in_tau.to(rest[0].dtype) if rest else None, None, None
