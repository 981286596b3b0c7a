r"""Successive softmaxes by their weights: what :mod:`khot.primitives.successive` defines, without logarithms.

With :math:`w = e^{a}` the step is :math:`p = w / \sum w` and :math:`w' = p (1 - p)^{1/\tau}`, so that for :math:`1/\tau = 1, 2, 3, 4` a row
costs a sum and a few products. It wants logits that are finite and lie so close together that no weight vanishes. A few rows are taken
through all their steps at a time, in buffers that stay in cache; the way back makes their softmaxes again.

With :math:`d` the gradient in the logits behind a step and :math:`g` that in ``p``, the gradient in front of it is

.. math:: d + p \bigl(h - \textstyle\sum p h\bigr), \qquad h = g - \frac{d}{\tau (1 - p)} .

In a row with an entry above 9/10, ``1 - p`` of that entry is the sum of the others, and its part of the gradient is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot.primitives.again import must_show, vjp_of

LARGE = 0.9
_REACH = 70.0  # between the largest and the smallest logit: e^-70 is far from the smallest number of float32, and stays so
_FEW = 1 << 16  # logits whose buffers stay in cache
_CALM = 8  # steps in which a gradient cannot grow beyond what the dtype holds: by less than 1 + 10 / tau each
_POWERS = (1.0, 2.0, 3.0, 4.0)


def takes(logits: Tensor, tau: Any, k: int) -> bool:
    """Whether the weights of these logits can be told apart; their values must be readable."""
    if isinstance(tau, Tensor) or 1 / tau not in _POWERS or k < 2 or not logits.numel():
        return False
    least, most = torch.aminmax(logits.detach())
    return float(most) - float(least) < _REACH  # of all rows; False with a nan


def steps(logits: Tensor, tau: float, k: int, out: Tensor | None = None) -> Iterator[Tensor]:
    """The ``k`` softmaxes of ``(rows, n)`` logits, each in ``out[i]`` or in a buffer that the next one overwrites."""
    w, rest = torch.softmax(logits, -1), torch.empty_like(logits)
    p = torch.empty_like(logits) if out is None else out[0]
    for i in range(k):
        p = p if out is None else out[i]
        torch.div(w, w.sum(-1, keepdim=True), out=p)
        yield p
        if i + 1 < k:
            torch.sub(1, p, out=rest)
            for row, place in large(p):
                rest[row] = rest[row].scatter(-1, place, others(p[row], place))
            torch.mul(p, rest, out=w)
            for _ in range(round(1 / tau) - 1):
                w.mul_(rest)


def large(p: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """If rows have a large entry: which rows, and its place in each."""
    most = p.amax(-1)
    if float(most.max()) > LARGE:
        row = most > LARGE
        yield row, p[row].argmax(-1, keepdim=True)


def others(p: Tensor, place: Tensor) -> Tensor:
    """What the entries beside the large one sum to, which keeps its digits where that one is nearly 1."""
    return p.scatter(-1, place, 0.0).sum(-1, keepdim=True)


def chunks(logits: Tensor) -> Iterator[slice]:
    some = max(1, _FEW // logits.shape[-1])
    return (slice(begin, begin + some) for begin in range(0, len(logits), some))


class Summed(Function):
    """The sum of the ``k`` softmaxes; keeps the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tau: float, k: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.rest = tau, k
        flat = logits.reshape(-1, logits.shape[-1])
        total = torch.empty_like(flat, dtype=torch.float64)
        for rows in chunks(flat):
            _add(steps(flat[rows], tau, k), total[rows], torch.zeros_like(flat[rows]))
        return total.to(logits.dtype).view(logits.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logits,), (tau, k) = ctx.saved_tensors, ctx.rest
        return _back(logits, tau, k, grad.unsqueeze(0).expand(k, *grad.shape), None), None, None


def _add(rows: Iterator[Tensor], total: Tensor, part: Tensor) -> None:
    """The sum of rows; more than a few of them lose digits in the dtype of ``part``."""
    total.zero_()
    for i, p in enumerate(rows):
        part += p
        if i % 32 == 31:
            total += part
            part.zero_()
    total += part


class Stacked(Function):
    """The ``k`` softmaxes as ``(k, ..., n)``; keeps them, and the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tau: float, k: int) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        rows = torch.empty((k, *flat.shape), dtype=flat.dtype, device=flat.device)
        for some in chunks(flat):
            _made(flat[some], tau, rows[:, some])
        rows = rows.view(k, *logits.shape)
        ctx.save_for_backward(logits, rows)
        ctx.rest = tau, k
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logits, rows), (tau, k) = ctx.saved_tensors, ctx.rest
        return _back(logits, tau, k, grad, rows), None, None


def _back(logits: Tensor, tau: float, k: int, grad: Tensor, rows: Tensor | None) -> Tensor:
    """The gradient in the logits, from that in every softmax; ``rows`` are those if they were kept."""
    if must_show(grad):
        return vjp_of(lambda x: _composed(x, tau, k).movedim(-2, 0), logits, grad)
    flat, grads = logits.reshape(-1, logits.shape[-1]), grad.reshape(k, -1, logits.shape[-1])
    kept = None if rows is None else rows.reshape(grads.shape)
    down, few = torch.empty_like(flat), next(chunks(flat))
    made = flat.new_empty((k if kept is None else 0, *flat[few].shape))
    for some in chunks(flat):
        down[some] = _walk(_made(flat[some], tau, made) if kept is None else kept[:, some], grads[:, some], tau)
    return down.view(logits.shape)


def _made(logits: Tensor, tau: float, out: Tensor) -> Tensor:
    """The softmaxes again, in ``out``."""
    out = out[:, : len(logits)]
    for _ in steps(logits, tau, len(out), out):
        pass
    return out


def _composed(logits: Tensor, tau: float, k: int) -> Tensor:
    from khot.primitives.successive import composed  # that file begins with this one

    return composed(logits, tau, k)


def _walk(rows: Tensor, grads: Tensor, tau: float) -> Tensor:
    """From the last softmax to the first, ``down`` being the gradient in the logits of the one below."""
    rest, part = torch.empty_like(rows[0]), torch.empty_like(rows[0])
    cut = min(torch.finfo(rows.dtype).max / 8 * tau, (torch.finfo(rows.dtype).max / 8) ** 0.5)  # it will be squared, and divided by tau
    torch.mul(rows[-1], grads[-1], out=part)
    down = torch.addcmul(part, rows[-1], part.sum(-1, keepdim=True), value=-1)
    for i in reversed(range(len(rows) - 1)):
        p, g = rows[i], grads[i]
        special = [(row, _by_large(p[row], g[row], down[row], place, tau)) for row, place in large(p)]
        torch.div(p, torch.sub(1, p, out=rest), out=rest)
        torch.mul(p, g, out=part).addcmul_(down, rest, value=-1 / tau)
        down.add_(part).addcmul_(p, part.sum(-1, keepdim=True), value=-1)
        for row, value in special:
            down[row] = value
        if i % _CALM == 0:
            down.nan_to_num_(0.0).clamp_(-cut, cut)
    return down


def _by_large(p: Tensor, g: Tensor, down: Tensor, place: Tensor, tau: float) -> Tensor:
    """The gradient in front of a step in rows with a large entry."""
    over = down / tau
    top, beside = over.gather(-1, place), others(p, place)
    h = g - (over / (1 - p)).scatter(-1, place, 0.0)
    share = (p / beside).scatter(-1, place, 0.0) - p
    return down + p * (h - (p * h).sum(-1, keepdim=True)) + top * share
