"""A sigmoid around the gap between the last item in and the first item out."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._tensors import Number, column
from khot.primitives.settle import settle_mask
from khot.registry import relaxation


@relaxation("threshold", kind="mask", cost="O(n)", paper="Zhu et al. 2025 (DFTopK)", sums_to_k=False, smooth=False)
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
    n = scores.shape[-1]
    if k in (0, n):
        return settle_mask(torch.full_like(scores, k / max(n, 1)) + 0 * scores.nan_to_num(0.0, 0.0, 0.0), scores, k)
    last_in, first_out = scores.gather(-1, scores.detach().topk(k + 1).indices[..., -2:]).chunk(2, -1)
    between = last_in.isfinite() & first_out.isfinite()
    cut = torch.where(between, last_in, 0.0) / 2 + torch.where(between, first_out, 0.0) / 2
    finite = scores.isfinite()
    mask = torch.sigmoid((torch.where(finite, scores, 0.0) - cut) / column(tau, scores))
    # Without a score on either side everything finite is in (too few are left) or out (enough are certain).
    return settle_mask(torch.where(between, mask, (first_out == -torch.inf).to(mask.dtype)), scores, k)
