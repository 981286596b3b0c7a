r"""Sparse top-k: projections onto the permutahedron of k-hot vectors.

The permutahedron of :math:`(1, \dots, 1, 0, \dots, 0)` is the k-capped simplex. Its isotonic problem has one block of equal values, the
one across the k-th place, on whichever side of it each item lies: the value of that block is a threshold, and is searched for as such,
in O(n) without a sort.
"""

from __future__ import annotations

import functools
import math
from numbers import Real

import torch
from torch import Tensor

from khot._tensors import Number, column, readable, wide_dtype
from khot.checks import door
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, builds, inside_only
from khot.registry import relaxation
from khot.relaxations.euclidean import EUCLIDEAN


@builds("permutahedron")
@functools.cache
def power(p: float) -> Family:
    r"""The squashing function of the regulariser :math:`\frac1p \|y\|_p^p`: :math:`F(u) = \min(u_+, 1)^{1/(p-1)}`."""
    if p == 2:
        return EUCLIDEAN
    m = 1 / (p - 1)

    def slope(y: Tensor) -> Tensor:
        # For p > 2 it is infinite at 0; its square root of a bound leaves room for the sum over a row.
        return inside_only(y, lambda q: (m * q ** (2 - p)).clamp(max=torch.finfo(q.dtype).max ** 0.5))

    return Family(
        "permutahedron",
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
    family=lambda p=4 / 3: power(_check_p(p)),
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
    return solve_mask(scores, k, tau, power(_check_p(p)))


def magnitude_topk(x: Tensor, k: Number, tau: Number = 1.0, *, p: float = 4 / 3, dim: int = -1) -> Tensor:
    r"""Soft shrinkage to the ``k`` values of largest magnitude: a relaxation of ``x * topk_mask(x.abs(), k)``.

    Values well inside the top k pass unchanged, those well outside become exactly 0; with :math:`q = p/(p-1)`,

    .. math:: |y_i| = \begin{cases} |x_i| & m_i = 1 \\ |x_i| - t + m_i t & m_i > 0 \\ 0 & \text{else} \end{cases}
              \qquad m_i = \min\Bigl(\frac1t \Bigl(\frac{|x_i| - t}{\tau}\Bigr)_+^{q-1}, 1\Bigr), \quad \textstyle\sum_i m_i = k

    Args:
        x: any shape, finite.
        k: how many to keep, a number or a tensor like ``x`` without ``dim``.
        tau: strength of the regularisation, a number or a tensor like ``k``; the limit 0 is the hard selection.
        p: above 1; the paper's are 4/3 and 2.
        dim: the dimension to select along.

    Returns:
        Like ``x``, with the signs of ``x``.

    Example:
        >>> magnitude_topk(torch.tensor([-5.0, -2.0, 3.0, 1.0]), k=2, tau=0.01)
        tensor([-5., -0., 3., 0.])

    Sander, Puigcerver, Djolonga, Peyre, Blondel 2023, "Fast, differentiable and sparse top-k".
    """
    return _magnitude(x, k, tau, dim=dim, p=p)


def _magnitude_of(x: Tensor, k: Number, tau: Number, *, p: float) -> Tensor:
    m = 1 / (_check_p(p) - 1)
    m = round(m) if math.isclose(m, round(m)) else m  # a whole power costs a tenth of another
    # Only values above the threshold matter. A guess of how many those are is put to the test.
    few = 12 * math.ceil(min(_largest(k), x.shape[-1])) + 32 if readable(x) else x.shape[-1]
    while 2 * few < x.shape[-1]:
        at = x.detach().abs().topk(few).indices
        part = x.gather(-1, at)
        kept, t = _shrunk(part, k, tau, m)
        if bool((part[..., -1:].abs() <= t).all()):
            return torch.zeros_like(x).scatter(-1, at, kept)
        few *= 4
    return _shrunk(x, k, tau, m)[0]


_magnitude = door(_magnitude_of, name="magnitude_topk", options=None, native_half=False, fractional=True)


def _largest(k: Number) -> float:
    if not isinstance(k, Tensor):
        return k
    return float(k.detach().max()) if k.numel() and readable(k) else math.inf


def _shrunk(x: Tensor, k: Number, tau: Number, m: float) -> tuple[Tensor, Tensor]:
    """The shrunk values and the threshold of every row."""
    size = x.to(wide_dtype(x)).abs()
    scale = torch.as_tensor(column(tau, size), dtype=size.dtype, device=size.device)
    t = _magnitude_threshold(size, column(k, size), scale, m)
    kept = _share(size, t, scale, m)
    shrunk = torch.where(kept == 1, size, torch.where(size > t, size - t + kept * t, 0.0))
    return (shrunk * x.sign()).to(x.dtype), t.detach()


_NEAR = 1e-13  # of k and of t: where shares begin with a power, a right sum alone does not tell where t is


def _share(size: Tensor, t: Tensor, tau: Tensor, m: float) -> Tensor:
    above = size > t
    rise = torch.where(above, size - t, 0.0) / tau
    return torch.where(above, (rise**m / t).clamp(max=1.0), 0.0)


def _magnitude_threshold(size: Tensor, k: Number, tau: Tensor, m: float) -> Tensor:
    """The ``t`` at which the shares sum to ``k``, with its exact first and second derivatives."""
    t = _search(size.detach(), k.detach() if isinstance(k, Tensor) else k, tau.detach(), m)
    for _ in range(2):  # one Newton step carries the gradient, the second the gradient of the gradient
        excess, slope = _excess(size, k, t, tau, m)
        flat = slope == 0
        t = t + torch.where(flat, 0.0, excess) / torch.where(flat, 1.0, slope)
    return t


def _search(size: Tensor, k: Number, tau: Tensor, m: float) -> Tensor:
    """Newton steps inside a bracket that always holds the root, and bisection where they leave it or crawl."""
    high = size.amax(-1, keepdim=True)
    low = torch.where(torch.as_tensor(k, dtype=size.dtype, device=size.device) <= 0, high, 0.0)
    t, before = (low + high) / 2, torch.full_like(high, torch.inf)
    looks = readable(size)
    for _ in range(16 * size.element_size() if looks else 8 * size.element_size()):
        excess, slope = _look(size, k, t, tau, m)
        left = excess.abs()
        enough, near = excess >= 0, (left <= _NEAR * k) & (left <= _NEAR * slope * t)
        low, high = torch.where(enough, t, low), torch.where(enough & ~near, high, t)
        there, middle = t + excess / slope, (low + high) / 2
        if looks and bool((near | (middle <= low) | (middle >= high)).all()):
            break
        sound = (there > low) & (there < high) & (left < before / 2)
        t, before = torch.where(sound, there, middle), left
    return high.clamp(min=torch.finfo(size.dtype).tiny)


def _look(size: Tensor, k: Number, t: Tensor, tau: Tensor, m: float) -> tuple[Tensor, Tensor]:
    """:func:`_excess` without gradient, and without ``torch.where``, which takes ten times as long as arithmetic."""
    rise = (size - t).clamp_(min=0).div_(tau)
    moves = rise > 0
    power = rise ** (m - 1)
    share = (power * rise).div_(t)
    slope = power.mul_(m / tau).div_(t).add_(share / t).mul_(moves.logical_and_(share < 1))
    return share.clamp_(max=1).sum(-1, keepdim=True) - k, slope.nan_to_num_(0.0).sum(-1, keepdim=True)


def _excess(size: Tensor, k: Number, t: Tensor, tau: Tensor, m: float) -> tuple[Tensor, Tensor]:
    """By how much the shares sum to more than ``k``, and how fast that falls with ``t``."""
    share = _share(size, t, tau, m)
    moves = (share > 0) & (share < 1)
    slope = torch.where(moves, share * (m / torch.where(moves, size - t, 1.0) + 1 / t), 0.0)
    return share.sum(-1, keepdim=True) - k, slope.sum(-1, keepdim=True)


def _check_p(p: float) -> float:
    if not isinstance(p, Real) or not 1 < p < math.inf:
        raise ValueError(f"p must be above 1 and finite (the paper's are 4/3 and 2), got {p}")
    return float(p)
