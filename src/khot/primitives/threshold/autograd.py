r"""The threshold family: :math:`y_i = F((x_i - t)/\tau)` with the one :math:`t` for which :math:`\sum_i y_i = k`.

One solver, one derivative. With :math:`v_i = F'(u_i)`, known from :math:`y_i` alone, and :math:`V = \sum_i v_i`, the optimality
condition gives

.. math:: \frac{\partial y_i}{\partial x_j} = \frac1\tau \Bigl(v_i [i = j] - \frac{v_i v_j}{V}\Bigr), \qquad
          \frac{\partial y_i}{\partial k} = \frac{v_i}{V} ,

so that the backward pass needs the output and nothing else. As it is written in terms of the output, it can be differentiated again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import Function

from khot import kernels
from khot._tensors import Number, column, in_forward_mode, in_reach, is_recorded, nests, without_tangent, work_dtype
from khot.primitives.threshold.family import Family
from khot.primitives.threshold.rows import LOCAL, Rows

_SMALL = 2.0**-50  # a power of two, so that units are exact


def solve_mask(scores: Tensor, k: Number, tau: Number, family: Family, rows: Rows = LOCAL) -> Tensor:
    """``(..., n) -> (..., n)``, differentiable in ``scores``, ``k`` and ``tau``."""
    k = column(k, scores) if isinstance(k, Tensor) else float(k)
    tau = column(tau, scores) if isinstance(tau, Tensor) else float(tau)
    if rows is not LOCAL:
        return _Rule.apply(scores, k, tau, family, False, rows)[0]
    return solve_columns(scores, k, tau, family)


def solve_spread(scores: Tensor, k: Number, tau: Number, family: Family, places: str) -> Tensor:
    """:func:`solve_mask` as one operator, for rows spread over the places of that name."""
    return by_operator(scores, column(k, scores), column(tau, scores), family, places)


def solve_columns(scores: Tensor, k: Number, tau: Number, family: Family) -> Tensor:
    """:func:`solve_mask` with ``k`` and ``tau`` already numbers or ``(..., 1)`` columns."""
    if in_forward_mode():
        return _Rule.apply(scores, k, tau, family, True, LOCAL)[0]
    native = kernels.pick("threshold", family.kernel, scores, k, tau)
    if native is not None:
        if is_grad_enabled() and (scores.requires_grad or _learns(k, tau)):
            return _apply_fused(scores, k, tau, family, native)
        return native.forward(scores, k, tau, family.kernel, shift=False, curve=family.curve)[0]
    if is_recorded():
        return by_operator(scores, k, tau, family)
    if not (is_grad_enabled() and (scores.requires_grad or _learns(k, tau))) and in_reach(scores):
        return mask_and_shift(scores, k, tau, family, native=False)[0]
    return _Rule.apply(scores, k, tau, family, False, LOCAL)[0]


def by_operator(scores: Tensor, k: Number, tau: Number, family: Family, places: str = "") -> Tensor:
    """The same as one registered operator, so that no compiler unrolls the search."""
    return both_by_operator(scores, k, tau, family, places)[0]


def both_by_operator(scores: Tensor, k: Number, tau: Number, family: Family, places: str = "") -> tuple[Tensor, Tensor]:
    """The mask and the threshold of every row, as one registered operator."""
    k_rows, k_value = (k, 0.0) if isinstance(k, Tensor) else (None, k)
    tau_rows, tau_value = (tau, 0.0) if isinstance(tau, Tensor) else (None, tau)
    return torch.ops.khot.threshold_forward(scores, k_rows, k_value, tau_rows, tau_value, family.name, family.alpha, places)


def _learns(k: Number, tau: Number) -> bool:
    return isinstance(k, Tensor) and k.requires_grad or isinstance(tau, Tensor) and tau.requires_grad


def mask_and_shift(x: Tensor, k: Number, tau: Number, family: Family, rows: Rows = LOCAL, *, native: bool = True) -> tuple[Tensor, Tensor]:
    """The mask and the threshold of every row, without gradient; ``native`` asks for native code first."""
    if rows.gather is not None:
        y, t = mask_and_shift(rows.gather(x), k, tau, family)
        return y.narrow(-1, rows.start, x.shape[-1]).contiguous(), t
    work = x.to(work_dtype(x))
    if rows.local and not x.shape[-1]:
        return torch.empty_like(x), work.new_zeros((*x.shape[:-1], 1))
    kernel = kernels.pick("threshold", family.kernel, x, k, tau) if native and rows is LOCAL else None
    if kernel is not None:
        y, t = kernel.forward(x, k, tau, family.kernel, curve=family.curve)
        return y, t.to(work.dtype)
    from khot.primitives.threshold.solve import solve_rows  # the reference is read when it is first needed

    y, t = solve_rows(work, k, tau, family, rows)
    return y.to(x.dtype), t


class _Fused(Function):
    """Native forward and backward for ordinary tensors: keeps the output, and the scores only for a gradient in tau."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: Number, tau: Number, family: Family, native: Any) -> Tensor:
        learns_k = type(k) is not float and ctx.needs_input_grad[1]
        if type(tau) is float:
            y, _ = native.forward(scores, k, tau, family.kernel, shift=False, curve=family.curve)
            ctx.save_for_backward(y)
            ctx.rest = family, native, tau, learns_k
        else:
            y, t = native.forward(scores, k, tau, family.kernel, curve=family.curve)
            ctx.save_for_backward(y, scores, t, tau)
            ctx.rest = family, native, None, learns_k
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        family, native, tau, learns_k = ctx.rest
        if tau is None:
            y, scores, t, tau = ctx.saved_tensors
            learns_tau = ctx.needs_input_grad[2]
        else:
            (y,), scores, t, learns_tau = ctx.saved_tensors, None, None, False
        # The output was made here, so that the gradient alone tells whether the native code may go on.
        if is_grad_enabled() or in_forward_mode() or kernels.pick("threshold", family.kernel, grad, 0.0, tau) is not native:
            # The gradient will be differentiated itself, or a mode or transform is active.
            t = None if t is None else t.to(work_dtype(y))
            return *gradients(grad, y, scores, t, tau, family, learns_k, learns_tau), None
        x = scores if learns_tau else None
        gx, gk, gtau = native.backward(grad, y, tau, family.kernel, x, t, grad_k=learns_k, curve=family.curve)
        return gx, gk, gtau, None, None


# What Function.apply does about transforms is settled: the native code was picked, so that there is none.
_apply_fused = super(Function, _Fused).apply  # pyright: ignore[reportAttributeAccessIssue]


class _FusedHard(Function):
    """The hard mask with the gradient of the soft one, both from one visit of the rows; ``k`` and ``tau`` are numbers."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: float, tau: float, family: Family, native: Any) -> Tensor:
        hard, y, _ = native(scores, k, tau, family.kernel)
        ctx.save_for_backward(y)
        ctx.rest = family, kernels.pick("threshold", family.kernel, scores, k, tau), tau, False
        return hard

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Fused.backward(ctx, grad)


def solve_hard(scores: Tensor, k: float, tau: float, family: Family) -> Tensor | None:
    """The hard mask with the gradient of the soft one, where one kernel makes both."""
    native = None if in_forward_mode() else kernels.pick("threshold and mask", family.kernel, scores, k, tau)
    return None if native is None else _FusedHard.apply(scores, k, tau, family, native)


class _Rule(Function):
    """Mask and threshold, with ``k`` and ``tau`` already columns, and their derivatives in both modes."""

    @staticmethod
    def forward(scores: Tensor, k: Number, tau: Number, family: Family, native: bool, rows: Rows) -> tuple[Tensor, Tensor]:
        return mask_and_shift(scores, k, tau, family, rows, native=native)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        scores, _, tau, ctx.family, _, ctx.rows = inputs
        y, t = output
        ctx.mark_non_differentiable(t)
        learns_tau = isinstance(tau, Tensor)
        ctx.tau = None if learns_tau else tau
        saved = (y, t, scores, tau) if learns_tau else (y, t)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        y, t, *rest = ctx.saved_tensors
        scores, tau = rest if rest else (None, ctx.tau)
        native = None if ctx.rows.local or is_grad_enabled() else kernels.pick("shard", ctx.family.name, y, grad, tau)
        rule = gradients if native is None else functools.partial(_passes, native)
        return *rule(grad, y, scores, t, tau, ctx.family, *ctx.needs_input_grad[1:3], rows=ctx.rows), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], scores: Tensor, k: Number, tau: Number, family: Family, native: bool, rows: Rows
    ) -> Any:
        def front(value: Any, dim: int | None) -> Any:
            return value if dim is None else value.movedim(dim, 0)

        if in_dims[0] is None:
            scores = scores.expand(info.batch_size, *scores.shape)
        scores, k, tau = front(scores, in_dims[0]), front(k, in_dims[1]), front(tau, in_dims[2])
        # Without the batch level native code may run.
        return _Rule.apply(scores, k, tau, family, True, rows), (0, 0)

    @staticmethod
    @nests
    def jvp(ctx: Any, d_scores: Tensor | None, d_k: Tensor | None, d_tau: Tensor | None, *_: None) -> tuple[Tensor, None]:
        y, t, *rest = map(without_tangent, ctx.saved_tensors)
        scores, tau = rest if rest else (None, ctx.tau)
        return follow(y, moves(y, d_scores, d_tau, scores, t, tau), d_k, ctx.family, ctx.rows), None


def moves(y: Tensor, d_scores: Tensor | None, d_tau: Tensor | None, scores: Tensor | None, t: Tensor, tau: Number) -> Tensor:
    """How ``(x - t) / tau`` moves where the threshold stays."""
    move = torch.zeros_like(y) if d_scores is None else d_scores / tau
    return move if d_tau is None or scores is None else move - d_tau / tau**2 * _distance(scores, t)


def follow(y: Tensor, move: Tensor, d_k: Tensor | None, family: Family, rows: Rows = LOCAL) -> Tensor:
    """How the mask moves, with the threshold that follows so that the sum is ``k``."""
    v = _slope(y, family)
    moved, slope = rows.rough(v * move, v)
    lift = -moved if d_k is None else d_k - moved
    return v * (move + _divide(lift, slope))


def gradients(
    grad: Tensor,
    y: Tensor,
    scores: Tensor | None,
    t: Any,
    tau: Number,
    family: Family,
    learns_k: bool,
    learns_tau: bool,
    rows: Rows = LOCAL,
) -> tuple[Tensor | None, ...]:
    """The gradients in the inputs of the rules below, by a formula that can be differentiated itself."""
    if isinstance(tau, Tensor):
        tau = rows.shared(tau)
    grad_u, grad_k = in_argument(grad, y, family, rows)
    grad_scores = grad_u / tau
    grad_tau = None
    if scores is not None and learns_tau:
        grad_tau = -rows.rough(grad_scores * _distance(scores, t) / tau)[0]
    return grad_scores.to(grad.dtype), grad_k if learns_k else None, grad_tau, None


def _passes(
    native: Any,
    grad: Tensor,
    y: Tensor,
    scores: Tensor | None,
    t: Tensor,
    tau: Number,
    family: Family,
    learns_k: bool,
    learns_tau: bool,
    rows: Rows,
) -> tuple[Tensor | None, ...]:
    """:func:`gradients` by native passes over the part of the row that is here."""
    weighted, slope, out = native.weigh(grad, y, family.name)
    mean = _divide(*rows.across(weighted, slope))
    grad_scores = native.gradient(grad, y, mean, tau, family.name, out)
    grad_tau = None
    if scores is not None and learns_tau:
        grad_tau = -rows.rough(grad_scores * _distance(scores, t) / tau)[0]
    return grad_scores, mean.to(y.dtype) if learns_k else None, grad_tau, None


def in_argument(grad: Tensor, y: Tensor, family: Family, rows: Rows = LOCAL) -> tuple[Tensor, Tensor]:
    """The gradient in ``u`` and, as a column, in ``k``; differentiable itself."""
    y = y.to(work_dtype(y))
    v = _slope(y, family)
    mean = _divide(*rows.rough(v * grad, v))
    mean = mean + 0 * y[..., :1].sum(-1, keepdim=True)  # a row of nan has a gradient of nan, though its slopes may be 0
    return v * (grad - rows.shared(mean)), mean


def _slope(y: Tensor, family: Family) -> Tensor:
    """The slope, and nan in a row of nan, whatever the family makes of that: its gradient is nan too."""
    return family.slope(y) + (y - y)


def _divide(value: Tensor, by: Tensor) -> Tensor:
    """``value / by``, and 0 where ``by`` is 0: a row that is saturated everywhere does not move.

    A small ``by`` is divided in larger units: the quotient is the same, and its derivative has no ``1 / by`` that overflows.
    """
    zero = by == 0
    unit = torch.where(by < _SMALL, _SMALL**-2, 1.0)
    return torch.where(zero, 0.0, value * unit) / torch.where(zero, 1.0, by * unit)


def _distance(scores: Tensor, t: Tensor) -> Tensor:
    """How far scores lie above the threshold; nothing for those that cannot move."""
    away = scores - t
    return torch.where(away.isfinite(), away, 0.0)
