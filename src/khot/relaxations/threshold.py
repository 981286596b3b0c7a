"""A sigmoid around the gap between the last item in and the first item out."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from khot._settle import Among
from khot._tensors import Number, column, in_forward_mode, in_reach, is_traced
from khot.primitives.select import ends, kth_largest
from khot.primitives.slopes import over
from khot.registry import relaxation


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    n = scores.shape[-1]
    if k in (0, n):
        return torch.full_like(scores, k / max(n, 1))
    if among is None:
        cut = _cut(scores, scores, k)
        if is_grad_enabled() and (scores.requires_grad or isinstance(tau, Tensor) and tau.requires_grad) or not in_reach(scores):
            return torch.sigmoid(over(scores - cut, column(tau, scores)))
        away = scores - cut  # nobody else holds it
        return (away if isinstance(tau, float) and tau == 1 else away.div_(column(tau, scores))).sigmoid_()
    mask = torch.sigmoid(over(scores - _cut(scores, among.hide(scores), among.k.clamp(min=1)), column(tau, scores)))
    everything = among.k >= among.items.sum(-1, keepdim=True)
    return torch.where(everything, 1.0, torch.where(among.k > 0, mask, 0.0))


def _cut(scores: Tensor, ranked: Tensor, k: Tensor | int) -> Tensor:
    """The middle between the k-th and the next; its gradient goes to the first items that have these scores."""
    last_in, first_out = ends(ranked, k) if type(k) is int else (kth_largest(ranked, k), kth_largest(ranked, k + 1))
    if is_traced() or in_forward_mode() or torch.is_grad_enabled() and scores.requires_grad:
        last_in, first_out = (scores.gather(-1, (ranked == end).to(torch.uint8).argmax(-1, keepdim=True)) for end in (last_in, first_out))
    return last_in / 2 + first_out / 2


@relaxation(
    "threshold",
    kind="mask",
    cost="O(n)",
    paper="Zhu et al. 2025 (DFTopK)",
    special=_mask,
    sums_to_k=False,
    smooth=False,
    flat_limit=False,
)
def threshold_topk(scores: Tensor, k: int, tau: Number = 1.0, *, dim: int = -1) -> Tensor:
    r"""Sigmoids around the mean of the k-th and the (k+1)-th largest score.

    .. math:: y_i = \sigma\bigl((x_i - (x_{(k)} + x_{(k+1)}) / 2) / \tau\bigr)

    The mask does not sum to k, except in the limit of small temperatures; :func:`khot.sigmoid_topk` finds the threshold for which it
    does.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select.
        tau: temperature, a number or ``(...)``.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``.

    Example:
        >>> threshold_topk(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.1)
        tensor([1.0000, 0.0067, 0.9933])
    """
    return _mask(scores, k, tau)
