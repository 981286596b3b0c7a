r"""Sparse top-k: projections onto the permutahedron of k-hot vectors.

The permutahedron of :math:`(1, \dots, 1, 0, \dots, 0)` is the k-capped simplex. Its isotonic problem has one block of equal values, the
one across the k-th place, on whichever side of it each item lies: the value of that block is a threshold, and is searched for as such,
in O(n) without a sort.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from khot._tensors import Number
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, builds, inside_only
from khot.registry import relaxation
from khot.relaxations.euclidean import EUCLIDEAN


@builds("permutahedron")
def power(p: float) -> Family:
    r"""The squashing function of the regulariser :math:`\frac1p \|y\|_p^p`: :math:`F(u) = \min(u_+, 1)^{1/(p-1)}`."""
    if p == 2:
        return EUCLIDEAN
    m = 1 / (p - 1)

    def slope(y: Tensor) -> Tensor:
        # For p > 2 it is infinite at 0; its square root of a bound leaves room for the sum over a row.
        return inside_only(y, lambda q: (m * q ** (2 - p)).clamp(max=torch.finfo(q.dtype).max ** 0.5))

    return Family(
        name="permutahedron",
        kernel="none",
        f=lambda u: u.clamp(0, 1) ** m,
        inverse=lambda y: y ** (p - 1),
        slope=slope,
        entropy=lambda y: inside_only(y, lambda q: (q - q**p) / p),
        smooth=False,
        alpha=p,
    )


@relaxation(
    "permutahedron",
    kind="mask",
    cost="O(n)",
    paper="Sander et al. 2023",
    grad_k=True,
    smooth=False,
    sparse=True,
    native_half=True,
    family=lambda p=4 / 3: power(check_p(p)),
)
def permutahedron_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, p: float = 4 / 3, dim: int = -1) -> Tensor:
    r"""Sparse top-k with a p-norm regulariser: exact zeros and ones, few entries between.

    .. math:: y = \arg\max_{y \in P(1_k)} x^\top y / \tau - \tfrac1p \|y\|_p^p ,
              \qquad y_i = \min\bigl((x_i/\tau + c)_+, 1\bigr)^{1/(p-1)}

    with :math:`P(1_k)` the convex hull of the k-hot vectors. ``p = 2`` is :func:`euclidean_topk`; towards ``p = 1`` the way from 0 to 1
    becomes gentler at the lower end, beyond 2 steeper. :func:`magnitude_topk` is the same for the values themselves.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature; below the gap between the k-th and the next score the result is the hard top-k.
        p: above 1; the paper's are 4/3 and 2.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> permutahedron_topk(torch.tensor([-5.0, -2.0, 3.0, 1.0]), k=2, tau=0.01)
        tensor([0., 0., 1., 1.])
        >>> permutahedron_topk(torch.tensor([3.0, 1.0, 2.5, 2.0]), k=2)
        tensor([1.0000, 0.0000, 0.8993, 0.1007])
    """
    return solve_mask(scores, k, tau, power(check_p(p)))


def check_p(p: float) -> float:
    if not isinstance(p, Real) or not 1 < p < math.inf:
        raise ValueError(f"p must be above 1 and finite (the paper's are 4/3 and 2), got {p}")
    return float(p)
