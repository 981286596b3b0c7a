r"""The gradient through a transport plan, from the plan alone, and the gradient of that gradient.

With :math:`S = \operatorname{diag}(\Gamma^\top 1) - \Gamma^\top \Gamma` and a gradient :math:`G` in the plan,
:math:`E = G - 1 \lambda^\top` with :math:`S \lambda` the column sums of :math:`\Gamma \circ (G - (\Gamma \circ G) 1 1^\top)` is the
gradient of a softmax whose potentials follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._tensors import is_recorded, wide_dtype
from khot.primitives.operators import define, derive


def plan_gradients(*inputs: Any) -> tuple[Tensor, Tensor]:
    """:func:`_formula`; as one operator where calls are recorded, so that no compiler works on it piece by piece."""
    return (torch.ops.khot.transport_backward if is_recorded() else _formula)(*inputs)


def curvature(gram: Tensor, sums: Tensor, full: Tensor, closed: Tensor) -> Tensor:
    """``S``, made regular."""
    # An empty place has an empty row; a problem without a rest does not change with a constant; a hard plan does not move at all.
    k = sums.shape[-1]
    ridge = 50 * torch.finfo(sums.dtype).eps
    return torch.diag_embed(sums + (1 - full) + ridge) - gram[..., :k, :k] + closed.to(sums.dtype) / k


def _through_softmax(plan: Tensor, grad: Tensor) -> Tensor:
    return plan * (grad - (plan * grad).sum(-1, keepdim=True))


def _formula(
    grad: Tensor, plan: Tensor, x: Tensor, tau: Tensor | None, tau_value: float, k: int, items: Tensor | None, count: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients in the scores and in ``tau``, 0 for a number; differentiable itself, as it is written in terms of the plan.

    Args:
        grad: ``(..., n, k)``, in the plan.
        plan: ``(..., n, k)``.
        x: ``(..., n)`` scores.
        tau: a ``(..., 1)`` column, or None for ``tau_value``.
        k: how many places.
        items: ``(..., n)``, which items take part; None: all.
        count: ``(..., 1)``, how many places there are for them.
    """
    over = tau_value if tau is None else tau
    wide, place = plan.to(wide_dtype(plan)), torch.arange(k, dtype=torch.long, device=x.device)
    full = torch.ones_like(wide[..., 0, :]) if count is None else (place < count).to(wide.dtype)
    left = x.shape[-1] if items is None else items.sum(-1, keepdim=True)
    closed = (left <= full.sum(-1, keepdim=True)).unsqueeze(-1)
    pull = _through_softmax(wide, grad.to(wide.dtype)).sum(-2).unsqueeze(-1)
    held = torch.linalg.solve_ex(curvature(wide.mT @ wide, wide.sum(-2), full, closed), pull).result.mT
    height = full.flip(-1).cumsum(-1).flip(-1)
    in_x = (_through_softmax(wide, grad - held) * height.unsqueeze(-2)).sum(-1) / over
    if tau is None:
        return in_x.to(x.dtype), x.new_zeros(1)
    # From the item that moves most: gradients sum to 0, and those of equal scores then cancel without a rounding.
    far = (x - x.gather(-1, in_x.detach().abs().argmax(-1, keepdim=True))).to(wide.dtype)
    in_tau, most = -(in_x * far).sum(-1, keepdim=True) / tau, torch.finfo(tau.dtype).max
    return in_x.to(x.dtype), in_tau.sum_to_size(tau.shape).clamp(-most, most).to(tau.dtype)


def _fake(grad: Tensor, plan: Tensor, x: Tensor, tau: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(1) if tau is None else tau.new_empty(tau.shape)


def _run(*inputs: Any) -> tuple[Tensor, Tensor]:
    in_x, in_tau = _formula(*inputs)
    return in_x.contiguous(), in_tau.contiguous()


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, plan, x, tau, *ctx.rest, items, count = inputs
    ctx.there = [value is not None for value in (tau, items, count)]
    ctx.save_for_backward(grad, plan, x, *(value for value in (tau, items, count) if value is not None))


def _derivative(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The formula, differentiated."""
    saved = list(ctx.saved_tensors)
    inputs = [value.detach().requires_grad_() for value in saved[: 3 + ctx.there[0]]]
    others = iter(saved[len(inputs) :])
    items, count = (next(others) if there else None for there in ctx.there[1:])
    tau_value, k = ctx.rest
    with torch.enable_grad():
        outputs = _formula(inputs[0], inputs[1], inputs[2], inputs[3] if ctx.there[0] else None, tau_value, k, items, count)
        used = [(out, g) for out, g in zip(outputs, grads, strict=True) if out.requires_grad]
        found = torch.autograd.grad([out for out, _ in used], inputs, [g for _, g in used], allow_unused=True)
    return *found[:3], found[3] if ctx.there[0] else None, None, None, None, None


_SCHEMA = (
    "transport_backward(Tensor grad, Tensor plan, Tensor x, Tensor? tau, float tau_value, SymInt k, Tensor? items, Tensor? count)"
    " -> (Tensor, Tensor)"
)
derive(define(_SCHEMA, _run, _fake), _derivative, _context)
