"""Infinite scores and nan, settled before and after the mathematics.

Items at +inf come first and share their places equally, items at -inf are never selected, a nan makes its own row nan, in value and
in gradient. The body of a relaxation only sees finite scores. Where a row is not all finite, the body is told which items take part
and how many of them to select, as an :class:`Among`, and what it returns is completed here. A body that does not name ``among`` in
its signature settles infinities itself; a nan and an empty row never reach it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number, column, readable, work_dtype


class Among(NamedTuple):
    """Which items of a row a body shall select from, and how many."""

    items: Tensor  # (..., n) bool: the finite ones; all, where there is none, so that no softmax is empty
    k: Tensor  # (..., 1): what is left of k behind the items at +inf, and no more than there are finite items

    def hide(self, scores: Tensor) -> Tensor:
        """The scores with -inf where an item takes no part, for sorting; without gradient."""
        return scores.detach().masked_fill(~self.items, -torch.inf)

    def wanted(self, places: int, first: int = 0) -> Tensor:
        """``(..., places, 1)`` bool: which of the places from ``first`` on are to be filled."""
        return torch.arange(first, first + places, dtype=torch.long, device=self.k.device).unsqueeze(-1) < self.k.unsqueeze(-1)


class _Special(NamedTuple):
    """What is known of rows that may hold infinities or nan."""

    safe: Tensor  # (..., n), 0 in place of what is not finite
    finite: Tensor  # (..., n)
    certain: Tensor  # (..., n), at +inf
    num_certain: Tensor  # (..., 1)
    left: Tensor  # (..., 1), how many are not at -inf
    lost: Tensor  # (..., 1), whether the row has a nan


def ordinary(scores: Tensor) -> bool:
    """Whether all scores are known to be finite, so that nothing special has to be done."""
    if not readable(scores):
        return False
    # One infinity or nan makes the sum infinite or nan. A sum that overflows without one is looked at again.
    values = scores.detach()
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def attached(out: Tensor, scores: Tensor) -> Tensor:
    """``out``, made a function of the scores where it is a constant, so that it has a gradient of 0."""
    if out.requires_grad or not (torch.is_grad_enabled() and scores.requires_grad):
        return out
    nothing = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), 0.0)
    return out + (nothing if out.ndim == scores.ndim else nothing.unsqueeze(-2))


def settled_mask(body: Callable[..., Tensor], special: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """A body ``(scores, k, tau, **options) -> (..., n)`` for scores of any kind.

    Args:
        body: for finite scores.
        special: the same with ``among=``; by default ``body``, if it names ``among``.
    """
    special = _takes_among(body, special)

    @functools.wraps(body)
    def mask(scores: Tensor, k: Number, tau: Number = 1.0, **options: Any) -> Tensor:
        if not scores.shape[-1]:
            return attached(torch.zeros_like(scores), scores)
        if ordinary(scores):
            return attached(body(scores, k, tau, **options), scores)
        rows = _look(scores)
        if special is None:
            return attached(body(_without_nan(scores, rows), k, tau, **options) + _poison(scores, rows), scores)
        out = special(rows.safe, k, tau, among=_among(rows, k), **options)
        wide_k = column(k, scores) if isinstance(k, Tensor) else k
        share = (wide_k / rows.num_certain.clamp(min=1).to(out.dtype)).clamp(max=1)
        out = torch.where(rows.certain, share.to(out.dtype), torch.where(rows.finite, out, 0.0))
        return attached(out + _poison(scores, rows), scores)

    return mask


def settled_matrix(body: Callable[..., Tensor], special: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """A body ``(scores, k, tau, **options) -> (..., k, n)`` for scores of any kind; places for which no item is left stay 0."""
    special = _takes_among(body, special)

    @functools.wraps(body)
    def matrix(scores: Tensor, k: int, tau: Number = 1.0, **options: Any) -> Tensor:
        if not scores.shape[-1]:
            return attached(scores.new_zeros((*scores.shape[:-1], k, 0)), scores)
        if ordinary(scores):
            return attached(body(scores, k, tau, **options), scores)
        rows = _look(scores)
        if special is None:
            return attached(body(_without_nan(scores, rows), k, tau, **options) + _poison(scores, rows).unsqueeze(-2), scores)
        out = special(rows.safe, k, tau, among=_among(rows, k), **options)
        shares = rows.certain.unsqueeze(-2) / rows.num_certain.clamp(min=1).unsqueeze(-1).to(out.dtype)
        out = _placed(torch.where(rows.finite.unsqueeze(-2), out, 0.0), shares, rows)
        return attached(out + _poison(scores, rows).unsqueeze(-2), scores)

    return matrix


def settled_select(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A body ``(x, scores, k, tau, **options) -> (..., k, d)`` for scores of any kind."""
    special = _takes_among(body, None)

    def select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, **options: Any) -> Tensor:
        if not scores.shape[-1]:
            return x[..., :0, :]
        if ordinary(scores):
            return body(x, scores, k, tau, **options)
        rows = _look(scores)
        if special is None:
            out = body(x, _without_nan(scores, rows), k, tau, **options)
        else:
            out = special(x, rows.safe, k, tau, among=_among(rows, k), **options)
            out = _placed(out, (rows.certain.to(x.dtype) / rows.num_certain.clamp(min=1)).unsqueeze(-2) @ x, rows)
        out = out * torch.where(rows.lost, torch.nan, 1.0).to(out.dtype).unsqueeze(-1)
        return out + _poison(scores, rows).sum(-1)[..., None, None]

    return select


def _takes_among(body: Callable[..., Tensor], special: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
    """The body that names ``among``; every body gives it a default, and reading that is much quicker than ``inspect.signature``."""
    return special or (body if "among" in (body.__kwdefaults__ or ()) else None)


def _look(scores: Tensor) -> _Special:
    finite, certain = scores.isfinite(), scores == torch.inf
    lost = scores.isnan().any(-1, keepdim=True)
    left = (scores > -torch.inf).sum(-1, keepdim=True)
    return _Special(torch.where(finite, scores, 0.0), finite, certain, certain.sum(-1, keepdim=True), left, lost)


def _among(rows: _Special, k: Number) -> Among:
    items = rows.finite | ~rows.finite.any(-1, keepdim=True)
    rest = (k - rows.num_certain) if isinstance(k, int) else column(k, rows.safe) - rows.num_certain.to(work_dtype(rows.safe))
    return Among(items, torch.minimum(rest.clamp(min=0), rows.finite.sum(-1, keepdim=True).to(rest.dtype)))


def _placed(out: Tensor, shares: Tensor, rows: _Special) -> Tensor:
    """The rows of a matrix behind those of the items at +inf, as far as there are items."""
    place = torch.arange(out.shape[-2], dtype=torch.long, device=out.device).unsqueeze(-1)
    num_certain, left = rows.num_certain.unsqueeze(-1), rows.left.unsqueeze(-1)
    if not (readable(num_certain) and not bool(num_certain.any())):
        out = out.gather(-2, (place - num_certain).clamp(min=0).expand(out.shape))
        out = torch.where(place < num_certain, shares, out)
    return torch.where(place < left, out, 0.0)


def _without_nan(scores: Tensor, rows: _Special) -> Tensor:
    return torch.where(rows.lost, 0.0, scores)


def _poison(scores: Tensor, rows: _Special) -> Tensor:
    """nan, with a gradient of nan, in the rows that have one; 0 elsewhere."""
    return torch.where(rows.lost, scores, 0.0) * torch.where(rows.lost, torch.nan, 0.0).to(scores.dtype)
