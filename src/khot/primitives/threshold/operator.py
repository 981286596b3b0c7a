"""The threshold family as operators of PyTorch: what compilers and tracing modes see.

``khot::threshold_forward`` and ``khot::threshold_backward`` come with shapes, derivatives to second order and batching rules. They run
the native kernel where it takes the tensors, and the reference elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, wide_dtype
from khot.primitives.operators import define, derive
from khot.primitives.threshold.autograd import gradients, mask_and_shift
from khot.primitives.threshold.family import family_of
from khot.primitives.threshold.rows import rows_of

_FORWARD = (
    "threshold_forward(Tensor x, Tensor? k, float k_value, Tensor? tau, float tau_value, str family, float alpha, str places='')"
    " -> (Tensor, Tensor)"
)
_BACKWARD = (
    "threshold_backward(Tensor grad, Tensor y, Tensor x, Tensor shift, Tensor? tau, float tau_value, str family, float alpha,"
    " bool learns_tau, str places='') -> (Tensor, Tensor, Tensor)"
)


def _forward(
    x: Tensor, k: Tensor | None, k_value: float, tau: Tensor | None, tau_value: float, family: str, alpha: float, places: str = ""
) -> tuple[Tensor, Tensor]:
    count, over = k_value if k is None else k, tau_value if tau is None else tau
    y, shift = mask_and_shift(x, count, over, family_of(family, alpha), rows_of(places, x, count, over))
    return y.contiguous(), shift.to(wide_dtype(x))


def _forward_fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))


def _backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    tau_value: float,
    family: str,
    alpha: float,
    learns_tau: bool,
    places: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    over = tau_value if tau is None else tau
    law = family_of(family, alpha)
    native = None if places else kernels.pick("threshold", law.kernel, y, grad, over)
    if native is not None:
        scores = x if learns_tau else None
        gx, gk, gtau = native.backward(grad, y, over, law.kernel, scores, shift.contiguous(), grad_k=True, curve=law.curve)
        return gx, gk, torch.zeros_like(gk) if gtau is None else gtau
    return _formula(grad, y, x, shift, over, family, alpha, learns_tau, places)


def _formula(
    grad: Tensor, y: Tensor, x: Tensor, shift: Tensor, tau: Number, family: str, alpha: float, learns_tau: bool, places: str
) -> tuple[Tensor, Tensor, Tensor]:
    near, rows = shift.to(torch.promote_types(y.dtype, torch.float32)), rows_of(places)
    gx, gk, gtau, _ = gradients(grad, y, x if learns_tau else None, near, tau, family_of(family, alpha), True, learns_tau, rows)
    assert gx is not None and gk is not None
    wide = gk.to(wide_dtype(y))
    return gx.to(y.dtype).contiguous(), wide, torch.zeros_like(wide) if gtau is None else gtau.to(wide.dtype)


def _backward_fake(grad: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    column = y.new_empty((*y.shape[:-1], 1), dtype=wide_dtype(y))
    return torch.empty_like(y, memory_format=torch.contiguous_format), column, torch.empty_like(column)


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, k, _, tau, ctx.tau_value, *ctx.rest = inputs
    y, shift = output
    ctx.mark_non_differentiable(shift)
    ctx.learns_k, ctx.learns_tau = k is not None, tau is not None
    # The scores are kept for the gradient in tau alone.
    ctx.save_for_backward(y, shift, x if ctx.learns_tau else y, *(value for value in (k, tau) if value is not None))


def _forward_derivative(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    y, shift, x, *rest = ctx.saved_tensors
    k, tau = (rest.pop(0) if ctx.learns_k else None), (rest.pop(0) if ctx.learns_tau else None)
    family, alpha, places = ctx.rest
    gx, gk, gtau = torch.ops.khot.threshold_backward(grad, y, x, shift, tau, ctx.tau_value, family, alpha, ctx.learns_tau, places)
    return gx, _like(gk, k), None, _like(gtau, tau), None, None, None, None


def _like(grad: Tensor, value: Tensor | None) -> Tensor | None:
    return None if value is None else grad.sum_to_size(value.shape).to(value.dtype)


def _backward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    grad, y, x, shift, tau, *ctx.rest = inputs
    ctx.save_for_backward(grad, y, x, shift, *(() if tau is None else (tau,)))


def _backward_derivative(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The formula of the first derivative, differentiated."""
    grad, y, x, shift, *tau = ctx.saved_tensors
    tau_value, *rest = ctx.rest
    inputs = [value.detach().requires_grad_() for value in (grad, y, x, *tau)]
    over = inputs[3] if tau else tau_value
    with torch.enable_grad():
        outputs = _formula(inputs[0], inputs[1], inputs[2], shift, over, *rest)
        used = [(out, g) for out, g in zip(outputs, grads, strict=True) if out.requires_grad and g is not None]
        found = torch.autograd.grad([out for out, _ in used], inputs, [g for _, g in used], allow_unused=True)
    return found[0], found[1], found[2], None, found[3] if tau else None, None, None, None, None, None


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return torch.ops.khot.threshold_forward(*_batched(info, in_dims, inputs, required=1)), (0, 0)


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return torch.ops.khot.threshold_backward(*_batched(info, in_dims, inputs, required=4)), (0, 0, 0)


def _batched(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...], required: int) -> list[Any]:
    """The batch as one more leading dimension of rows; the first ``required`` tensors all get it."""
    out = []
    for i, (value, dim) in enumerate(zip(inputs, in_dims, strict=True)):
        if isinstance(value, Tensor) and dim is not None:
            value = value.movedim(dim, 0)
        elif isinstance(value, Tensor) and i < required:
            value = value.expand(info.batch_size, *value.shape)
        out.append(value)
    return out


derive(define(_FORWARD, _forward, _forward_fake, batched=_forward_vmap), _forward_derivative, _forward_context)
derive(define(_BACKWARD, _backward, _backward_fake, batched=_backward_vmap), _backward_derivative, _backward_context)
