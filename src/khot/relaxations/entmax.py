"""Entmax top-k: the Tsallis family between sigmoid and Euclidean top-k."""

from __future__ import annotations

import functools
from numbers import Real

import torch
from torch import Tensor

from khot._tensors import Number
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, builds, inside_only
from khot.registry import relaxation
from khot.relaxations.euclidean import EUCLIDEAN
from khot.relaxations.sigmoid import SIGMOID

_NUM_ITERS = 8  # enough for float64 at every alpha


@builds("entmax")
@functools.cache
def tsallis(alpha: float) -> Family:
    r"""The squashing function of the Tsallis entropy, with :math:`a = \alpha - 1`, measured from the lower end of its support:

    .. math:: u = \frac{1 + p^{a} - (1 - p)^{a}}{a\, 2^{a}} .
    """
    if alpha == 1:
        return SIGMOID
    if alpha == 2:
        return EUCLIDEAN
    a = alpha - 1
    scale = a * 2**a

    def f(u: Tensor) -> Tensor:
        rise = u.double() * scale  # 0 at the lower end, 2 at the upper
        tail = _tail(torch.minimum(rise, 2 - rise).clamp(min=0.0), a).to(u.dtype)
        return torch.where(rise < 1, tail, 1 - tail)

    def inverse(y: Tensor) -> Tensor:
        return (y**a - torch.expm1(a * torch.log1p(-y))) / scale

    def slope(y: Tensor) -> Tensor:
        return inside_only(y, lambda p: 2**a / (p ** (a - 1) + (1 - p) ** (a - 1)))

    def entropy(y: Tensor) -> Tensor:
        return inside_only(y, lambda p: (1 - p ** (a + 1) - (1 - p) ** (a + 1)) / (scale * (a + 1)))

    return Family("entmax", f=f, inverse=inverse, slope=slope, entropy=entropy, smooth=False, alpha=alpha)


def _tail(rise: Tensor, a: float) -> Tensor:
    """The ``q`` in [0, 1/2] with ``q^a + 1 - (1-q)^a = rise``, ``rise`` in [0, 1]."""
    if a == 0.5:
        s = 1 - rise
        return (rise * (2 - rise)).square() / (2 * (1 + s * (2 - s * s).sqrt()))
    # Newton in z = q^a on a convex function with slopes between 1 and 2, from the right of its root: it never overshoots.
    z = rise.clamp(max=0.5**a)
    for _ in range(_NUM_ITERS):
        q = z ** (1 / a)
        rest = torch.expm1(a * torch.log1p(-q))
        z = (z - (z - rest - rise) / (1 + (1 + rest) / (1 - q) * q / z.clamp(min=1e-300))).clamp(min=0.0)
    return z ** (1 / a)


@relaxation(
    "entmax",
    kind="mask",
    cost="O(n)",
    paper="Peters, Niculae, Martins 2019; Blondel, Martins, Niculae 2020",
    grad_k=True,
    smooth=False,
    sparse=True,
    native_half=True,
    family=lambda alpha=1.5: tsallis(_check_alpha(alpha)),
)
def entmax_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, alpha: float = 1.5, dim: int = -1) -> Tensor:
    r"""Entmax top-k: smooth like the sigmoid in the middle, exactly 0 and 1 at the ends like the projection.

    .. math:: y = \arg\max_{y \in [0,1]^n,\ \sum_i y_i = k} x^\top y / \tau
              + \frac{2^{1-\alpha}}{\alpha(\alpha-1)} \sum_i \bigl(1 - y_i^\alpha - (1-y_i)^\alpha\bigr)

    ``alpha = 1`` is :func:`sigmoid_topk` and ``alpha = 2`` is :func:`euclidean_topk`; the factor makes both ends meet exactly.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature; the limit 0 is the hard top-k.
        alpha: between 1 and 2; 1.5 has a closed form and is the fastest.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> entmax_topk(torch.tensor([3.0, 1.0, 2.5, 2.0]), k=2, tau=0.5)
        tensor([1.0000, 0.0000, 0.7421, 0.2579])
    """
    return solve_mask(scores, k, tau, tsallis(_check_alpha(alpha)))


def _check_alpha(alpha: float) -> float:
    if not isinstance(alpha, Real) or not 1 <= alpha <= 2:
        raise ValueError(f"alpha must be between 1 (sigmoid) and 2 (euclidean), got {alpha}")
    return float(alpha)
