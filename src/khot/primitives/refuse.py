"""Second derivatives that do not exist are refused: a constant in their place would be wrong without a word."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import in_forward_mode, is_recorded


def no_second_derivative(grad: Tensor, name: str, *inputs: Tensor) -> Tensor:
    """``grad`` as it is; where it is differentiated again, an error that says which method has no second derivative."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return grad
    return _Refuse.apply(grad, name, *inputs)


def once(x: Tensor, name: str) -> Tensor:
    """``x`` itself, whose gradient cannot be differentiated again."""
    if in_forward_mode() or is_recorded() or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Once.apply(x, name)


class _Once(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        x, ctx.name = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return no_second_derivative(grad, ctx.name, *ctx.saved_tensors), None


class _Refuse(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, name: str, *inputs: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(f"{ctx.name} has no second derivative; differentiate it once")
