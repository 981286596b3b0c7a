"""Soft ranks as operators of PyTorch: what compilers see, so that they neither unroll nor specialise the regression.

``khot::ranks`` and ``khot::ranks_backward`` have shapes and batching rules, and the first has a derivative. They run the native code
where it takes the tensors, and the formula elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, wide_dtype
from khot.kernels.order import Law
from khot.primitives.operators import define_rows, derive
from khot.primitives.rank_formula import formula, gradients, order_and_blocks

_LAW = "int number, float sign, float factor, SymInt centre, bool wide"
_FORWARD = f"ranks(Tensor x, Tensor? tau, float tau_value, {_LAW}) -> (Tensor, Tensor)"
_BACKWARD = f"ranks_backward(Tensor grad, Tensor x, Tensor items, Tensor? tau, float tau_value, {_LAW}) -> (Tensor, Tensor)"


def solve(x: Tensor, tau: Number, law: Law) -> Tensor:
    """Ranks or sorted values, differentiable once in ``x`` and in a column ``tau``."""
    column, number = (tau, 1.0) if isinstance(tau, Tensor) else (None, tau)
    return torch.ops.khot.ranks(x, column, number, *law)[0]


def _forward(x: Tensor, tau: Tensor | None, tau_value: float, *law: Any) -> tuple[Tensor, Tensor]:
    over, law = tau_value if tau is None else tau, Law(*law)
    native = kernels.pick("ranks", x, over)
    if native is not None:
        return native.forward(x, over, law)
    order, blocks = order_and_blocks(x, over, law)
    fresh = torch.nn.functional.pad(blocks[..., 1:] != blocks[..., :-1], (1, 0), value=True)
    return formula(x, over, order, blocks, law).contiguous(), torch.where(fresh, ~order, order).to(torch.int32).contiguous()


def _forward_fake(x: Tensor, tau: Tensor | None, tau_value: float, *law: Any) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(x) if Law(*law).wide else x.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape, dtype=torch.int32, device=x.device)


def _backward(grad: Tensor, x: Tensor, items: Tensor, tau: Tensor | None, tau_value: float, *law: Any) -> tuple[Tensor, Tensor]:
    over, law = tau_value if tau is None else tau, Law(*law)
    native = kernels.pick("ranks", x, over, grad)
    if native is not None:
        return native.backward(grad, x, items.contiguous(), over, law)
    x, over = x.detach().requires_grad_(), over if tau is None else tau.detach().requires_grad_()
    in_x, in_tau = gradients(grad, x, items, over, law, (True, tau is not None))
    assert in_x is not None
    column = torch.zeros((*x.shape[:-1], 1), dtype=torch.float64, device=x.device) if in_tau is None else in_tau.to(torch.float64)
    return in_x.contiguous(), column.contiguous()


def _backward_fake(grad: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty((*x.shape[:-1], 1), dtype=torch.float64, device=x.device)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, tau, ctx.tau_value, *ctx.law = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], *(() if tau is None else (tau,)))


def _derivative(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, items, *tau = ctx.saved_tensors
    in_x, in_tau = torch.ops.khot.ranks_backward(grad, x, items, tau[0] if tau else None, ctx.tau_value, *ctx.law)
    return in_x, in_tau.to(tau[0].dtype) if tau else None, None, *[None] * len(ctx.law)


derive(define_rows(_FORWARD, _forward, _forward_fake), _derivative, _context)
define_rows(_BACKWARD, _backward, _backward_fake)
