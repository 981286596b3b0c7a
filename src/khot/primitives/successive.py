r"""Successive softmaxes: each over what the ones before it have left.

.. math:: p^{(i)} = \mathrm{softmax}(a^{(i)}), \quad a^{(i+1)} = a^{(i)} + \log(1 - p^{(i)}) / \tau

At most one entry of a softmax exceeds 9/10. There 1 - p is the sum of the others, taken from their logits: p itself loses its digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._tensors import Number, in_forward_mode, is_traced, readable, wide_dtype
from khot.primitives import weights
from khot.primitives.slopes import over

_LARGE = 0.9


def successive_softmaxes(logits: Tensor, tau: Number, k: int) -> Tensor:
    """``(..., n) -> (..., k, n)``, differentiable any number of times in ``logits`` and ``tau``.

    Ordinary tensors pass a fused rule that keeps the result and the logits of every row, nothing else. It cuts gradients that the
    dtype cannot hold: at a small ``tau`` those of equal scores grow like a power of 1/tau.

    Args:
        logits: ``(..., n)``; -inf excludes an item.
        tau: a number or ``(..., 1)``.
        k: how many.

    Example:
        >>> successive_softmaxes(torch.tensor([2.0, 6.0, 4.0]), 0.5, 2)
        tensor([[0.0159, 0.8668, 0.1173],
                [0.1259, 0.1259, 0.7482]])
    """
    if is_traced() or in_forward_mode() or not readable(logits):
        return composed(logits, tau, k)
    if weights.takes(logits, tau, k):
        return weights.Stacked.apply(logits, tau, k).movedim(0, -2)
    return _Fused.apply(logits, tau, k).movedim(0, -2)


def sum_of_softmaxes(logits: Tensor, tau: Number, k: int) -> Tensor:
    """The sum of the ``k`` rows; without a gradient, or where weights will do, no matrix is built."""
    if not (is_traced() or in_forward_mode()) and readable(logits) and weights.takes(logits, tau, k):
        return weights.Summed.apply(logits, tau, k)
    learns = torch.is_grad_enabled() and (logits.requires_grad or isinstance(tau, Tensor) and tau.requires_grad)
    if learns or is_traced() or in_forward_mode() or not readable(logits):
        return successive_softmaxes(logits, tau, k).sum(-2)
    total, part = torch.zeros_like(logits, dtype=wide_dtype(logits)), torch.zeros_like(logits)
    for i, (_, p) in enumerate(_steps(logits, tau, k)):
        part += p
        if i % 32 == 31:  # a sum of more rows than that loses digits
            total += part
            part.zero_()
    return total.add_(part).to(logits.dtype)


def composed(logits: Tensor, tau: Number, k: int) -> Tensor:
    """The same by differentiable steps."""
    rows = []
    for i in range(k):
        log_p = torch.log_softmax(logits, -1)
        rows.append(log_p.exp())
        if i + 1 < k:
            logits = logits + over(_log_rest(log_p), tau)
    return torch.stack(rows, -2) if rows else logits.unsqueeze(-2)[..., :0, :]


def _log_rest(log_p: Tensor) -> Tensor:
    """``log(1 - p)``."""
    large = log_p > math.log(_LARGE)
    others = log_p.masked_fill(large, -torch.inf)
    alone = (others == -torch.inf).all(-1, keepdim=True)  # nothing else is left to draw; the rows that follow are not used
    others = torch.logsumexp(torch.where(alone, 0.0, others), -1, keepdim=True)
    small = torch.where(large, -1.0, log_p)
    return torch.where(large, torch.where(alone, 0.0, others), torch.log1p(-small.exp()))


def _steps(logits: Tensor, tau: Number, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits and the softmax of each row."""
    for i in range(k):
        p = torch.softmax(logits, -1)
        yield logits, p
        if i + 1 < k:
            rest = p.neg().log1p_()
            for row, place, log_others, log_rest in _large(logits, p):
                del log_others
                rest[row] = rest[row].scatter(-1, place, log_rest)
            logits = torch.add(logits, rest, alpha=1 / tau) if not isinstance(tau, Tensor) else rest.div_(tau).add_(logits)


def _large(logits: Tensor, p: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """If rows have a large entry: which rows, its place, the log of the others' weights and of their share."""
    row = p.amax(-1) > _LARGE
    if bool(row.any()):
        a = logits[row]
        place = p[row].argmax(-1, keepdim=True)
        log_others = torch.logsumexp(a.scatter(-1, place, -torch.inf), -1, keepdim=True)
        log_rest = -torch.nn.functional.softplus(a.gather(-1, place) - log_others)
        yield row, place, log_others, torch.where(log_others == -torch.inf, 0.0, log_rest)


class _Fused(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tau: Number, k: int) -> Tensor:
        rows = torch.empty((k, *logits.shape), dtype=logits.dtype, device=logits.device)
        learns = any(ctx.needs_input_grad)
        seen = torch.empty_like(rows) if learns else rows
        for i, (a, p) in enumerate(_steps(logits, tau, k)):
            rows[i] = p
            if learns:
                seen[i] = a
        ctx.save_for_backward(logits, rows, seen, *((tau,) if isinstance(tau, Tensor) else ()))
        ctx.tau, ctx.k = tau if not isinstance(tau, Tensor) else None, k
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, seen, *rest = ctx.saved_tensors
        tau = rest[0] if rest else ctx.tau
        if torch.is_grad_enabled():  # it will be differentiated again
            inputs = [x for x, needs in zip((logits, tau), ctx.needs_input_grad, strict=False) if needs]
            found = torch.autograd.grad(composed(logits, tau, ctx.k).movedim(-2, 0), inputs, grad, create_graph=True)
            places = iter(found)
            return *(next(places) if needs else None for needs in ctx.needs_input_grad[:2]), None
        return *_walk_back(grad, rows, seen, tau, ctx.needs_input_grad[1]), None


def _walk_back(grad: Tensor, rows: Tensor, seen: Tensor, tau: Number, learns_tau: bool) -> tuple[Tensor | None, Tensor | None]:
    """From the last row to the first, ``down`` being the gradient in the logits of the row below."""
    cut, down, grad_tau = _cut(tau, rows.dtype), None, None
    for i in reversed(range(rows.shape[0])):
        p, g = rows[i], grad[i]
        if down is None:
            down = _through_softmax(p, g)
            continue
        if learns_tau and isinstance(tau, Tensor):
            share = _share(tau, rows)
            part = down * (seen[i + 1] - seen[i]).nan_to_num(0.0, 0.0, 0.0)
            part = -part.minimum(share).maximum(-share).sum(-1, keepdim=True) / tau
            grad_tau = part if grad_tau is None else grad_tau + part
        down = _through_step(p, seen[i], g, down, tau).nan_to_num(0.0).clamp(-cut, cut)
    zero = grad.sum(0) if down is None else down
    return zero, (torch.zeros_like(zero[..., :1]) if grad_tau is None else grad_tau) if learns_tau else None


def _cut(tau: Number, dtype: torch.dtype) -> Any:
    """The largest gradient in the logits that is kept: it will be squared here, and divided by ``tau`` outside."""
    most = torch.finfo(dtype).max / 8
    return (most * tau).clamp(max=most**0.5) if isinstance(tau, Tensor) else min(most * tau, most**0.5)


def _share(tau: Tensor, rows: Tensor) -> Tensor:
    """What each of the terms of the gradient in ``tau`` may have before it is divided by ``tau``, so that their sum is a number."""
    most = torch.finfo(rows.dtype).max / (8 * rows.shape[0] * rows.shape[-1])
    return most * tau.clamp(max=1.0)


def _through_softmax(p: Tensor, g: Tensor) -> Tensor:
    return p * (g - (p * g).sum(-1, keepdim=True))


def _through_step(p: Tensor, a: Tensor, g: Tensor, down: Tensor, tau: Number) -> Tensor:
    """The gradient in the logits of a row: by its softmax, by ``log(1 - p)``, and as part of the logits below."""
    over = down / tau
    large = list(_large(a, p))
    if not large:
        return down + _through_softmax(p, g - over / (1 - p))
    (row, place, log_others, _), top = large[0], torch.zeros_like(p, dtype=torch.bool)
    top[row] = top[row].scatter(-1, place, torch.ones_like(place, dtype=torch.bool))
    share = torch.zeros_like(p)
    share[row] = (a[row] - log_others).exp().scatter(-1, place, 0.0) - p[row]
    share = torch.where(top.any(-1, keepdim=True) & (share.sum(-1, keepdim=True) > -0.5), share, 0.0)  # alone: it stays as it is
    by_softmax = _through_softmax(p, g - torch.where(top, 0.0, over / (1 - p)))
    return down + by_softmax + torch.where(top, over, 0.0).sum(-1, keepdim=True) * share
