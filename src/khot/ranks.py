"""The verbs of soft ranks and soft sorting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from khot._tensors import Number, any_autocast, work_dtype
from khot.checks import check_scores, check_tau, within_range
from khot.primitives.rank import Regularization, check_regularization, ranks, sorted_values


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
    return _enter(ranks, x, tau, descending, regularization, dim)


def soft_sort(x: Tensor, tau: Number = 1.0, *, descending: bool = False, regularization: Regularization = "l2", dim: int = -1) -> Tensor:
    r"""Differentiable sorted values: the projection of ``(n, ..., 1) / tau`` onto the permutahedron of the values.

    .. math:: s = \arg\min_{s \in P(x)} \tfrac12 \|s - \rho/\tau\|^2, \qquad \rho = (n, \dots, 1)

    and with ``kl`` the logarithm of the projection of :math:`e^{\rho/\tau}` onto :math:`P(e^x)`. Here the hard limit is reached once
    no two neighbours in order are further apart than ``1/tau``.

    Args:
        x: any shape, finite; a nan makes its own row nan.
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
    return _enter(sorted_values, x, tau, descending, regularization, dim)


def _enter(body: Callable[..., Tensor], x: Tensor, tau: Number, descending: bool, regularization: Regularization, dim: int) -> Tensor:
    """Check, move ``dim`` last, compute half precision in float32 and without autocast, and return in the dtype of ``x``."""
    check_regularization(regularization)
    check_scores(x, dim, name="x")
    check_tau(tau, x, dim)
    if any_autocast() and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _run(body, x, tau, descending, regularization, dim)
    return _run(body, x, tau, descending, regularization, dim)


def _run(body: Callable[..., Tensor], x: Tensor, tau: Number, descending: bool, regularization: Regularization, dim: int) -> Tensor:
    rows = x.movedim(dim, -1).to(work_dtype(x))
    return body(rows, within_range(tau, x), regularization, descending=descending).to(x.dtype).movedim(-1, dim)
