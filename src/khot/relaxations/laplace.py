"""Laplace top-k (LapSum)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._tensors import Number
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, Quick, known
from khot.primitives.threshold.ordinary import ordinary
from khot.registry import relaxation

_PER_TWO = -1 / math.log(2)  # exp takes three times as long as exp2


def _cdf(u: Tensor) -> Tensor:
    side = u.sign()  # the tail below, 1 - tail above, and 1/2 between; torch.where takes ten times as long
    return torch.addcmul(side * 0.5 + 0.5, side, torch.exp(-u.abs()), value=-0.5)


def _write(u: Tensor, out: Tensor) -> Tensor:
    tail = torch.abs(u, out=out).neg_().exp_()
    half = u.sign_().mul_(0.5)
    tail.mul_(half)
    return torch.sub(half.add_(0.5), tail, out=out)


def _tails(u: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.minimum(y, torch.sub(1, y, out=out), out=out)


def _sums(u: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    slope = torch.abs(u, out=free).mul_(_PER_TWO).exp2_().sum(-1, keepdim=True)
    side = u.sign_()
    above = side.sum(-1, keepdim=True).add_(u.shape[-1])
    return above.sub_(side.mul_(free).sum(-1, keepdim=True)).mul_(0.5), slope.mul_(0.5)


def _inverse(y: Tensor) -> Tensor:
    low = y < 0.5  # each side by itself: at 1/2 the derivative of a minimum would be that of neither
    return torch.where(low, torch.log(2 * torch.where(low, y, 0.5)), -torch.log(2 * torch.where(low, 0.5, 1 - y)))


def _entropy(y: Tensor) -> Tensor:
    inside = (y > 0) & (y < 1)
    p = torch.where(inside, torch.minimum(y, 1 - y), 0.5)
    return torch.where(inside, p - p * torch.log(2 * p), 0.0)


def _log_density(u: Tensor) -> Tensor:
    return -u.abs() - math.log(2)


def _log_cdf(u: Tensor) -> Tensor:
    low = u < 0  # each side by itself: at 0 the derivative of abs is 0, and that of this function is 1
    return torch.where(low, torch.where(low, u, 0.0) - math.log(2), torch.log1p(-0.5 * torch.exp(-torch.where(low, 0.0, u))))


LAPLACE = known(
    Family(
        name="laplace",
        kernel="laplace",
        f=_cdf,
        inverse=_inverse,
        slope=lambda y: torch.minimum(y, 1 - y),
        entropy=_entropy,
        log_f=_log_cdf,
        log_slope=_log_density,
        quick=Quick(_write, _tails, _sums),
    )
)


@relaxation(
    "laplace",
    kind="mask",
    cost="O(n)",
    paper="Struski et al. 2025 (LapSum)",
    grad_k=True,
    native_half=True,
    family=lambda: LAPLACE,
    ordinary=ordinary(LAPLACE),
)
def laplace_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1) -> Tensor:
    r"""Laplace top-k: the threshold scheme with the distribution function of the Laplace law.

    .. math:: y_i = L(x_i / \tau + c), \quad \textstyle\sum_i y_i = k, \qquad
              L(u) = \begin{cases} \tfrac12 e^{u} & u < 0 \\ 1 - \tfrac12 e^{-u} & u \ge 0 \end{cases}

    LapSum finds ``c`` in closed form after a sort; here it is searched for, which costs less than the sort.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature; the limit 0 is the hard top-k.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> laplace_topk(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.5)
        tensor([0.9766, 0.1960, 0.8274])
    """
    return solve_mask(scores, k, tau, LAPLACE)
