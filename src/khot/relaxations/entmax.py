"""Entmax top-k: the Tsallis family between sigmoid and Euclidean top-k."""

from __future__ import annotations

from numbers import Real

from torch import Tensor

from khot._tensors import Number, column, readable
from khot.checks import check_per_row
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, builds
from khot.primitives.threshold.per_row import solve_per_row
from khot.primitives.threshold.tsallis import tsallis_family
from khot.registry import relaxation
from khot.relaxations.euclidean import EUCLIDEAN
from khot.relaxations.sigmoid import SIGMOID

_MOST = 10.0  # beyond it the mask goes from 0 to 1 within 4e-4 tau: the hard top-k


@builds("entmax")
def tsallis(alpha: float) -> Family:
    """The squashing function of the Tsallis entropy for one ``alpha``, by its own solver at both known ends."""
    if alpha == 1:
        return SIGMOID
    if alpha == 2:
        return EUCLIDEAN
    return tsallis_family(alpha - 1, alpha)


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
def entmax_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, alpha: Number = 1.5, dim: int = -1) -> Tensor:
    r"""Entmax top-k: smooth like the sigmoid in the middle, exactly 0 and 1 at the ends like the projection.

    .. math:: y = \arg\max_{y \in [0,1]^n,\ \sum_i y_i = k} x^\top y / \tau
              + \frac{2^{1-\alpha}}{\alpha(\alpha-1)} \sum_i \bigl(1 - y_i^\alpha - (1-y_i)^\alpha\bigr)

    ``alpha = 1`` is :func:`sigmoid_topk` and ``alpha = 2`` is :func:`euclidean_topk`; the factor makes both meet exactly. Below 1 no weight
    is exactly 0, and the tails are heavier than those of the sigmoid: a weight falls like :math:`u^{-1/(1-\alpha)}`. Above 2 the middle is
    steeper than the ends, and the distance from 0 to 1 shrinks like :math:`2^{-\alpha}`.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature; the limit 0 is the hard top-k.
        alpha: above 0 and up to 10; 1.5 has a closed form and is the fastest; native code runs from 1.125 to 3. A tensor, a
            scalar or of shape ``(...)``, receives a gradient.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> entmax_topk(torch.tensor([3.0, 1.0, 2.5, 2.0]), k=2, tau=0.5)
        tensor([1.0000, 0.0000, 0.7421, 0.2579])
    """
    if isinstance(alpha, Tensor):
        _check_alphas(alpha, scores)
        return solve_per_row(scores, column(k, scores), column(tau, scores), _beside(alpha, scores))
    return solve_mask(scores, k, tau, tsallis(_check_alpha(alpha)))


def _beside(alpha: Tensor, scores: Tensor) -> Tensor:
    found = column(alpha, scores)
    assert isinstance(found, Tensor)
    return found


def _check_alpha(alpha: Number) -> float:
    if isinstance(alpha, Tensor):
        raise TypeError("alpha must be a number here, got a tensor; soft_topk and entmax_topk take one per row")
    if not isinstance(alpha, Real) or not 0 < float(alpha) <= _MOST:
        raise ValueError(f"alpha must be above 0 and at most {_MOST:g} (1 is sigmoid, 2 is euclidean), got {alpha}")
    return float(alpha)


def _check_alphas(alpha: Tensor, scores: Tensor) -> None:
    check_per_row("alpha", alpha, scores)
    if readable(alpha) and not bool(((alpha > 0) & (alpha <= _MOST)).all()):
        came = f"values from {alpha.min().item():g} to {alpha.max().item():g}"
        raise ValueError(f"alpha must be above 0 and at most {_MOST:g}, got {came}; learn raw with alpha = 1 + torch.sigmoid(raw)")
