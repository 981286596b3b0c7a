"""The ordinary call, from the verb to the native code in as few steps as there are.

:func:`khot.kernels.ordinary.ask` alone decides what is ordinary. All else, from a tensor for ``k`` to a tracer, a mode or a transform,
takes the general way through the door and :func:`khot.primitives.threshold.autograd.solve_mask`, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.autograd.function import Function

from khot import kernels
from khot._tensors import Number, in_forward_mode, in_reach
from khot.kernels import ordinary as native
from khot.kernels.cpu import FAMILIES
from khot.kernels.library import LIBRARY
from khot.primitives.threshold.autograd import gradients
from khot.primitives.threshold.family import Family

Plan = tuple[bytes, Family]


def ordinary(family: Family) -> Callable[..., Tensor | None] | None:
    """``(scores, k, tau, hard=False) -> mask`` of a family without options, or ``None`` where the call is not ordinary.

    The hard mask has the gradient of the soft one. Without the library no call is ordinary.
    """
    if not LIBRARY:
        return None
    code = FAMILIES[family.kernel]

    def mask(scores: Tensor, k: Number, tau: Number, hard: bool = False) -> Tensor | None:
        asked = native.ask(scores, k, tau, code)
        if asked is None or in_forward_mode():
            return None
        learns = scores.requires_grad and is_grad_enabled()
        if not hard:
            return _apply(scores, (asked, family)) if learns else native.forward(scores, asked)
        if type(k) is not int:
            return None
        return _apply_hard(scores, (asked, family))[0] if learns else native.mask(scores, asked)

    return mask


class _Ordinary(Function):
    """Native forward and backward, which keeps the output."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, plan: Plan) -> Tensor:
        y = native.forward(scores, plan[0])
        ctx.save_for_backward(y)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gradient(grad, ctx.saved_tensors[0], ctx.plan), None


class _OrdinaryHard(Function):
    """The hard mask with the gradient of the soft one, which is an output too so that the gradient has a derivative."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        y = native.forward(scores, plan[0])
        ctx.save_for_backward(y)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return native.mask(scores, plan[0]), y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_soft: Tensor | None) -> tuple[Tensor | None, None]:
        given = [one for one in (grad, grad_soft) if one is not None]
        return _gradient(sum(given[1:], start=given[0]), ctx.saved_tensors[0], ctx.plan) if given else None, None


def _gradient(grad: Tensor, y: Tensor, plan: Plan) -> Tensor:
    # The mask was made here, so that the gradient alone tells whether the native code may go on.
    if in_reach(grad) and not is_grad_enabled() and grad.dtype is y.dtype and kernels.enabled() and not in_forward_mode():
        return native.backward(grad, y, plan[0])
    # The gradient will be differentiated itself, or a mode or transform is active.
    found = gradients(grad, y, None, None, native.tau_of(plan[0]), plan[1], False, False)[0]
    assert found is not None
    return found


# What Function.apply does about transforms is settled: the call is ordinary, so that there is none.
_apply = super(Function, _Ordinary).apply  # pyright: ignore[reportAttributeAccessIssue]
_apply_hard = super(Function, _OrdinaryHard).apply  # pyright: ignore[reportAttributeAccessIssue]
