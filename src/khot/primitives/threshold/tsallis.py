r"""The squashing function of the Tsallis entropy, for one ``a = alpha - 1`` or one per row, and the derivative in ``a``.

Measured from the lower end of its support, the inverse is

.. math:: u = \frac{1 + p^{a} - (1 - p)^{a}}{a\, 2^{a}} .

For :math:`y_i = F_a((x_i - t)/\tau)` with :math:`\sum_i y_i = k`, a change of ``a`` acts on ``y`` as the change
:math:`-\tau\, \partial u / \partial a` of the scores does: the derivative in ``a`` follows from the one in the scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import Number, readable, wide_dtype, work_dtype
from khot.kernels.curve import Curve, fit
from khot.primitives.threshold.autograd import gradients, in_argument, mask_and_shift
from khot.primitives.threshold.bracket import solve_bracket
from khot.primitives.threshold.family import Family, inside_only

_NUM_ITERS = 8  # enough for float64 at every a up to 2
_LEAST_TABLED = 0.125  # below it the tail turns too sharply for the native table


def tsallis_family(a: Any, alpha: float = 0.0) -> Family:
    """``a`` in (0, 2], a number or a ``(..., 1)`` column: then the family fits the rows that the column stands beside, in one piece."""
    scale = a * 2**a

    def f(u: Tensor) -> Tensor:
        rise = u.double() * scale  # 0 at the lower end, 2 at the upper
        tail = _tail(torch.minimum(rise, 2 - rise).clamp(min=0.0), a).to(u.dtype)
        return torch.where(rise < 1, tail, 1 - tail)

    def slope(y: Tensor) -> Tensor:
        return inside_only(y, lambda p: 2**a / (p ** (a - 1) + (1 - p) ** (a - 1)))

    def entropy(y: Tensor) -> Tensor:
        return inside_only(y, lambda p: (1 - p ** (a + 1) - (1 - p) ** (a + 1)) / (scale * (a + 1)))

    kernel, curve = _native(a)
    return Family(
        "entmax", f=f, inverse=lambda y: _inverse(y, a), slope=slope, entropy=entropy, smooth=False, alpha=alpha, kernel=kernel, curve=curve
    )


def _native(a: Any) -> tuple[str, Callable[[], Curve] | None]:
    """The name of the native code for this ``a``, and what it wants besides; the table is made when it is first asked for."""
    if isinstance(a, Tensor) or not _LEAST_TABLED <= a <= 2:
        return "none", None
    if a == 0.5:
        return "entmax15", lambda: Curve(a * 2**a)
    return "entmax", functools.cache(lambda: fit(a, a * 2**a, lambda rise: _log_tail(rise, a)))


def _log_tail(rise: Tensor, a: float) -> Tensor:
    """log2 of :func:`_tail`, also where that is too small for a number."""
    return _tail_above(rise, a).log2() if a > 1 else _power_below(rise, a).log2() / a


def _inverse(y: Tensor, a: Any) -> Tensor:
    return (y**a - torch.expm1(a * torch.log1p(-y))) / (a * 2**a)


def _inverse_in_a(y: Tensor, a: Tensor) -> Tensor:
    """The derivative of the inverse in ``a``, and 0 at both ends, where the mask does not move."""

    def inside(p: Tensor) -> Tensor:
        change = (p**a * p.log() - (1 - p) ** a * torch.log1p(-p)) / (a * 2**a)
        return change - _inverse(p, a) * (1 / a + torch.full_like(a, 2.0).log())

    return inside_only(y, inside)


def _tail(rise: Tensor, a: Any) -> Tensor:
    """The ``q`` in [0, 1/2] with ``q^a + 1 - (1-q)^a = rise``, ``rise`` in [0, 1]."""
    if isinstance(a, Tensor):
        a = a.double()
        return torch.where(a > 1, _tail_above(rise, a.clamp(min=1.0)), _tail_below(rise, a.clamp(max=1.0)))
    if a == 0.5:
        s = 1 - rise
        return (rise * (2 - rise)).square() / (2 * (1 + s * (2 - s * s).sqrt()))
    return _tail_above(rise, a) if a > 1 else _tail_below(rise, a)


def _tail_below(rise: Tensor, a: Any) -> Tensor:
    return _power_below(rise, a) ** (1 / a)


def _power_below(rise: Tensor, a: Any) -> Tensor:
    """``q^a`` for ``a <= 1``: Newton in ``z = q^a`` on a convex function with slopes from 1 to 2, from the right: it never overshoots."""
    half = torch.as_tensor(0.5**a, dtype=rise.dtype, device=rise.device)
    z = torch.minimum(rise, half)
    for _ in range(_NUM_ITERS):
        q = z ** (1 / a)
        rest = torch.expm1(a * torch.log1p(-q))
        z = (z - (z - rest - rise) / (1 + (1 + rest) / (1 - q) * q / z.clamp(min=1e-300))).clamp(min=0.0)
    return z


def _tail_above(rise: Tensor, a: Any) -> Tensor:
    """For ``1 < a <= 2``: Newton in ``q`` on a convex function with slopes between 1 and 2, from the right, likewise."""
    q = 0.5 * rise
    for _ in range(_NUM_ITERS):
        value = q**a - torch.expm1(a * torch.log1p(-q))
        q = (q - (value - rise) / (a * (q ** (a - 1) + (1 - q) ** (a - 1)))).clamp(0.0, 0.5)
    return q


def solve_per_row(scores: Tensor, k: Number, tau: Number, alpha: Tensor) -> Tensor:
    """``(..., n) -> (..., n)`` with columns ``k``, ``tau``, ``alpha``; differentiable in all of them, any number of times."""
    k, tau = (value if isinstance(value, Tensor) else torch.full_like(alpha, value) for value in (k, tau))
    if not scores.numel():
        return scores + 0 * (k + tau + alpha).to(scores.dtype)
    return _PerRow.apply(scores.to(work_dtype(scores)), k, tau, alpha - 1)[0].to(scores.dtype)


def _solved(scores: Tensor, k: Tensor, tau: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The mask and the thresholds: by the solver of a number where all rows have the same ``a``, else one family per row."""
    if readable(a) and bool((a == a.flatten()[0]).all()):
        return mask_and_shift(scores, k, tau, tsallis_family(float(a.flatten()[0])))
    mask, shift = solve_bracket(scores, k.to(wide_dtype(scores)), tau, tsallis_family(a))
    return mask, shift


class _PerRow(Function):
    """No ``jvp``: forward mode raises."""

    @staticmethod
    def forward(scores: Tensor, k: Tensor, tau: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return _solved(scores, k, tau, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        scores, _, tau, a = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, scores, tau, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        y, t, scores, tau, a = ctx.saved_tensors
        family = tsallis_family(a)
        grad_scores, grad_k, grad_tau = gradients(grad, y, scores, t, tau, family, True, True)[:3]
        grad_a = -(in_argument(grad, y, family)[0] * _inverse_in_a(y, a)).sum(-1, keepdim=True)
        return grad_scores, grad_k, grad_tau, grad_a
