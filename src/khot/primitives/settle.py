"""What the matrix methods share: infinite scores, missing items, nan, and rows in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from khot._tensors import Number, readable

PIECE = 1 << 20  # entries of a (rows, n) block that are worked on at once


def ordinary(scores: Tensor) -> bool:
    """Whether all scores are known to be finite, so that nothing special has to be done."""
    return readable(scores) and bool(scores.detach().isfinite().all())


def finite_part(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The scores with 0 in place of what is not finite, and which columns are open: the finite ones, or all where there is none."""
    finite = scores.isfinite()
    return torch.where(finite, scores, 0.0), finite | ~finite.any(-1, keepdim=True)


def settle_rows(weights: Tensor, scores: Tensor, first: int = 0) -> Tensor:
    """Put the infinite scores into a matrix made from the finite ones.

    Rows of items at +inf share themselves equally among those, rows that find no item left are 0, a nan makes everything nan.

    Args:
        weights: ``(..., rows, n)``, the rows for the places ``first``, ``first + 1``, ...
        scores: ``(..., n)``.
        first: the place of the first row.
    """
    if ordinary(scores):
        return weights
    place = torch.arange(first, first + weights.shape[-2], dtype=torch.long, device=scores.device).unsqueeze(-1)
    certain, left = scores == torch.inf, (scores > -torch.inf).sum(-1, keepdim=True).unsqueeze(-1)
    num_certain = certain.sum(-1, keepdim=True).unsqueeze(-1)
    shares = certain.unsqueeze(-2) / num_certain.clamp(min=1).to(weights.dtype)
    weights = torch.where(place < num_certain, shares, torch.where(place < left, weights, 0.0))
    return weights.masked_fill(scores.isnan().any(-1, keepdim=True).unsqueeze(-1), torch.nan)


def settle_mask(mask: Tensor, scores: Tensor, k: Number) -> Tensor:
    """The same for a mask: exactly 1 (or an equal share of ``k``) at +inf, exactly 0 at -inf, nan where the row has one."""
    if ordinary(scores):
        return mask
    certain = scores == torch.inf
    share = (k / certain.sum(-1, keepdim=True).clamp(min=1)).clamp(max=1).to(mask.dtype)
    mask = torch.where(certain, share, torch.where(scores == -torch.inf, 0.0, mask))
    return mask.masked_fill(scores.isnan().any(-1, keepdim=True), torch.nan)


def pieces(scores: Tensor, k: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of a block small enough to stay in cache."""
    step = max(1, PIECE // max(1, scores.numel()))
    for start in range(0, k, step):
        yield start, min(k, start + step)


def mask_by_rows(rows: Callable[[int, int], Tensor], scores: Tensor, k: int) -> Tensor:
    """The sum of the rows of a matrix that is made in pieces; only a gradient keeps them all."""
    total = torch.zeros_like(scores)
    for start, stop in pieces(scores, k):
        total = total + rows(start, stop).sum(-2)
    return settle_mask(total, scores, k)


def select_by_rows(rows: Callable[[int, int], Tensor], x: Tensor, scores: Tensor, k: int) -> Tensor:
    """``matrix @ x`` for a matrix that is made in pieces."""
    parts = [rows(start, stop) @ x for start, stop in pieces(scores, k)]
    return torch.cat(parts, -2) if parts else x[..., :0, :]


def deeper(tau: Number) -> Number:
    """A column ``tau`` beside one dimension more; plain numbers stay as they are."""
    return tau if isinstance(tau, (int, float)) else tau.unsqueeze(-1)
