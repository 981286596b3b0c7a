"""Sigmoids scaled to the right sum."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._tensors import Number, column
from khot.primitives.settle import settle_mask
from khot.registry import relaxation


@relaxation(
    "scaled",
    kind="mask",
    cost="O(n)",
    paper="Pervez, Lippe, Gavves 2023",
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
    finite, certain = scores.isfinite(), scores == torch.inf
    k = torch.as_tensor(column(k, scores), dtype=scores.dtype, device=scores.device)
    rest = (k - certain.sum(-1, keepdim=True)).clamp(min=0)  # +inf comes first
    u = torch.where(finite, scores, 0.0) / column(tau, scores)
    p, q = torch.where(finite, torch.sigmoid(u), 0.0), torch.where(finite, torch.sigmoid(-u), 0.0)
    down = p * _ratio(rest, p)
    up = 1 - q * _ratio((finite.sum(-1, keepdim=True) - rest).clamp(min=0), q)
    return settle_mask(torch.where(_total(p) >= rest, down, up), scores, k)


def _total(values: Tensor) -> Tensor:
    wide = values.dtype if values.device.type == "mps" else torch.float64
    return values.sum(-1, keepdim=True, dtype=wide).to(values.dtype)


def _ratio(target: Tensor, values: Tensor) -> Tensor:
    total = _total(values)
    return target / torch.where(total > 0, total, 1.0)
