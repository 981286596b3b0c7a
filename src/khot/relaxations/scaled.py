"""Sigmoids scaled to the right sum."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, readable, wide_dtype
from khot.primitives.slopes import over
from khot.primitives.threshold.rows import wide_sum
from khot.registry import relaxation


def _mask(scores: Tensor, k: Number, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    n = scores.shape[-1] if among is None else among.items.sum(-1, keepdim=True)
    count = torch.as_tensor(column(k, scores) if among is None else among.k, dtype=wide_dtype(scores), device=scores.device)
    u = over(scores, column(tau, scores))
    p = torch.sigmoid(u)
    total = _total(p, among)
    short = total.detach() < count
    if readable(short) and not bool(short.any()):
        return p * _ratio(count, total).to(p.dtype)
    # A short row scales its complement: what it sums to is never less than what it shall, so that nothing is scaled up.
    p = torch.where(short, torch.sigmoid(-u), p)
    y = p * _ratio(torch.where(short, n - count, count), _total(p, among)).to(p.dtype)
    return torch.where(short, 1 - y, y)


def _ratio(target: Tensor, total: Tensor) -> Tensor:
    return target / total.clamp(min=torch.finfo(torch.float32).tiny)


def _total(values: Tensor, among: Among | None) -> Tensor:
    return wide_sum(values if among is None else torch.where(among.items, values, 0.0))


@relaxation(
    "scaled",
    kind="mask",
    cost="O(n)",
    paper="Pervez, Lippe, Gavves 2023",
    special=_mask,
    grad_k=True,
    smooth=False,
    shift_invariant=False,
    hard_limit=False,
)
def scaled_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1) -> Tensor:
    r"""Independent sigmoids, scaled down where they sum to more than k, and towards 1 where they sum to less.

    .. math:: p = \sigma(x / \tau), \; s = \textstyle\sum_i p_i, \qquad
              y = \frac{k}{s} p \text{ if } s \ge k, \qquad 1 - y = \frac{n - k}{n - s} (1 - p) \text{ otherwise}

    It costs one pass, but it is not invariant to a shift of the scores, and its limit for small temperatures is not the top-k:
    :func:`khot.sigmoid_topk` moves the sigmoids where this one scales them. The paper feeds these probabilities to conditional Poisson
    sampling, which is :func:`khot.sample` with ``design="conditional_poisson"`` here; the scaling is the one that the public code
    of later comparisons takes from it, with the complement where the sum is short.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature, a number or ``(...)``.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> scaled_topk(torch.tensor([3.0, 1.0, 2.0, -1.0]), k=2)
        tensor([0.6724, 0.5160, 0.6217, 0.1898])
    """
    return _mask(scores, k, tau)
