"""Soft ranks and soft sorting: projections onto the permutahedron."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from khot._tensors import Number, column, wide_dtype
from khot.checks import check_scores, check_tau
from khot.primitives.isotonic import block_first, block_logsumexp, block_mean, block_sum, kl_blocks, l2_blocks

Regularization = Literal["l2", "kl"]


def soft_rank(x: Tensor, tau: Number = 1.0, *, descending: bool = False, regularization: Regularization = "l2", dim: int = -1) -> Tensor:
    r"""Differentiable ranks, from 1 to n: the projection of the scaled values onto the permutahedron.

    .. math:: r = \arg\min_{r \in P(n, \dots, 1)} \tfrac12 \|r - x/\tau\|^2
              \qquad\text{or}\qquad \arg\min_{r \in P(n, \dots, 1)} \mathrm{KL}(r, e^{x/\tau})

    :math:`P(w)` is the convex hull of all orders of :math:`w`. The projection is one sort and one isotonic regression. Once
    neighbouring values are ``tau`` apart (``tau log n`` with ``kl``), the ranks are the hard ones.

    Args:
        x: any shape; infinite values rank at the ends, a nan makes its own row nan.
        tau: strength of the regularisation, a number or a tensor like ``x`` without ``dim``.
        descending: give the rank 1 to the largest value rather than to the smallest.
        regularization: ``"l2"`` or ``"kl"``.
        dim: the dimension to rank along.

    Returns:
        Ranks like ``x``; they sum to :math:`n(n+1)/2`.

    Example:
        >>> soft_rank(torch.tensor([5.0, 1.0, 2.0]), tau=2.0)
        tensor([3.0000, 1.2500, 1.7500])
        >>> soft_rank(torch.tensor([5.0, 1.0, 2.0]), tau=0.1, descending=True)
        tensor([1., 3., 2.])

    Blondel, Teboul, Berthet, Djolonga 2020, "Fast differentiable sorting and ranking".
    """
    check_regularization(regularization)
    check_scores(x, dim, name="x")
    check_tau(tau, x, dim)
    rows = x.movedim(dim, -1)
    return wide_ranks(-rows if descending else rows, tau, regularization).to(x.dtype).movedim(-1, dim)


def soft_sort(x: Tensor, tau: Number = 1.0, *, descending: bool = False, regularization: Regularization = "l2", dim: int = -1) -> Tensor:
    r"""Differentiable sorted values: the projection of ``(n, ..., 1) / tau`` onto the permutahedron of the values.

    .. math:: s = \arg\min_{s \in P(x)} \tfrac12 \|s - \rho/\tau\|^2, \qquad \rho = (n, \dots, 1)

    and with ``kl`` the logarithm of the projection of :math:`e^{\rho/\tau}` onto :math:`P(e^x)`. Here the hard limit is reached once
    no two neighbours in order are further apart than ``1/tau``.

    Args:
        x: any shape, finite.
        tau: strength of the regularisation, a number or a tensor like ``x`` without ``dim``.
        descending: largest first.
        regularization: ``"l2"`` or ``"kl"``.
        dim: the dimension to sort along.

    Returns:
        Sorted values like ``x``; with ``l2`` they sum to what ``x`` sums to.

    Example:
        >>> soft_sort(torch.tensor([5.0, 1.0, 2.0]))
        tensor([1.6667, 2.6667, 3.6667])
        >>> soft_sort(torch.tensor([5.0, 1.0, 2.0]), tau=0.1)
        tensor([1., 2., 5.])

    Blondel, Teboul, Berthet, Djolonga 2020, "Fast differentiable sorting and ranking".
    """
    check_regularization(regularization)
    check_scores(x, dim, name="x")
    check_tau(tau, x, dim)
    rows = x.movedim(dim, -1)
    rows = rows.to(wide_dtype(rows))
    # Ascending is the negative of the descending sort of the negated values.
    values = _sorted_values(rows if descending else -rows, column(tau, rows), regularization)
    return (values if descending else -values).to(x.dtype).movedim(-1, dim)


def check_regularization(regularization: str) -> None:
    if regularization not in ("l2", "kl"):
        raise ValueError(f"regularization must be 'l2' or 'kl', got {regularization!r}")


def wide_ranks(x: Tensor, tau: Number, regularization: Regularization) -> Tensor:
    """Ascending soft ranks of ``(..., n)`` in float64, where the device has it: the ranks of long rows need the digits."""
    n = x.shape[-1]
    wide = x.to(wide_dtype(x))
    tau = column(tau, wide)
    order = wide.detach().argsort(dim=-1, descending=True, stable=True)
    finite = torch.where(wide.isinf(), 0.0, wide).gather(-1, order)
    places = torch.arange(n, 0, -1, dtype=wide.dtype, device=x.device)
    blocks = _rank_blocks(wide.detach().gather(-1, order), tau, places, regularization)
    # Within a block the values are close to each other: their differences are small and exact.
    away = (finite - block_first(finite, blocks)) / tau
    places = places.expand_as(away)
    if regularization == "l2":
        ranks = block_mean(places, blocks) + (away - block_mean(away, blocks))
    else:
        ranks = block_sum(places, blocks) * torch.exp(away - block_logsumexp(away, blocks))
    ranks = torch.where(wide.isnan().any(-1, keepdim=True), torch.nan, ranks)
    return torch.zeros_like(ranks).scatter(-1, order, ranks)


def _rank_blocks(x: Tensor, tau: Number, places: Tensor, regularization: Regularization) -> Tensor:
    """The blocks of sorted values that share their ranks.

    Ranks lie between 1 and n, so that values too far apart never share a block. Cutting their gap down to that distance changes no
    block and keeps the sums short.
    """
    tau = torch.as_tensor(tau, dtype=x.dtype, device=x.device).detach()
    reach = x.shape[-1] if regularization == "l2" else torch.log(places[:1]) + 1
    gaps = torch.where(x[..., 1:] == x[..., :-1], 0.0, (x[..., :-1] - x[..., 1:]) / tau)
    fallen = torch.nn.functional.pad(-torch.minimum(gaps, torch.as_tensor(reach, dtype=x.dtype, device=x.device)).cumsum(-1), (1, 0))
    if regularization == "l2":
        return l2_blocks(fallen - places)
    return kl_blocks(fallen - places.log(), places)


def _sorted_values(x: Tensor, tau: Number, regularization: Regularization) -> Tensor:
    """Descending soft sort of ``(..., n)``."""
    n = x.shape[-1]
    values = x.sort(-1, descending=True).values
    ramp = torch.arange(n, 0, -1, dtype=x.dtype, device=x.device).expand_as(values) / tau
    if regularization == "l2":
        blocks = l2_blocks(ramp - values)
        return block_mean(values, blocks) + (ramp - block_mean(ramp, blocks))
    blocks = kl_blocks(ramp - values, torch.exp(values - values.amax(-1, keepdim=True)))
    return block_logsumexp(values, blocks) + (ramp - block_logsumexp(ramp, blocks))
