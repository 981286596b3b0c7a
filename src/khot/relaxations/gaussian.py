"""Gaussian top-k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._tensors import Number
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, Quick, known
from khot.primitives.threshold.ordinary import ordinary
from khot.registry import relaxation

_SATURATED = 15.0  # F is 0 or 1 in float32 from here on


def _density(y: Tensor) -> Tensor:
    """The normal density at the normal quantile ``y``: both the slope of the family and its entropy."""
    inside = (y >= torch.finfo(y.dtype).tiny) & (y < 1)  # below, the derivative of the quantile is beyond the dtype
    u = torch.special.ndtri(torch.where(inside, y, 0.5))
    return torch.where(inside, _bell(u), 0.0)


def _bell(u: Tensor) -> Tensor:
    return torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)


def _cdf(u: Tensor) -> Tensor:
    return 0.5 * torch.erfc(u * -math.sqrt(0.5))  # torch.special.ndtr loses the lower tail


def _write(u: Tensor, out: Tensor) -> Tensor:
    return torch.mul(u, -math.sqrt(0.5), out=out).erfc_().mul_(0.5)


def _write_bell(u: Tensor, y: Tensor, out: Tensor) -> Tensor:
    top = torch.full((1, 1), math.log2(1 / math.sqrt(2 * math.pi)), dtype=u.dtype, device=u.device)
    return torch.addcmul(top, u, u, value=-0.5 / math.log(2), out=out).exp2_()  # exp takes three times as long as exp2


def _line(mean: Tensor) -> tuple[Tensor, Tensor]:
    height = torch.special.ndtri(mean)
    return height, _write_bell(height, mean, torch.empty_like(height))


def _sums(u: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    slope = _write_bell(u, u, free).sum(-1, keepdim=True)
    # gelu is u times F, in a third of the time that erfc takes; it loses the digits of the lower tail.
    total = torch.nn.functional.gelu(u.clamp_(-_SATURATED, _SATURATED)).div_(u).sum(-1, keepdim=True)
    return total, slope


_FAR = 10.0  # from here on the series is exact to double precision
_SERIES = tuple((-1.0) ** i * math.prod(range(1, 2 * i, 2)) for i in range(16, 0, -1))  # of Mills' ratio times x, in 1 / x^2


def _log_cdf(u: Tensor) -> Tensor:
    """``torch.special.log_ndtr``, whose derivative far out has lost its digits: 6 times too large at -10,000 in float32."""
    far = u < -_FAR
    x = torch.where(far, -u, _FAR)
    z = (1 / x).square()
    rest = torch.zeros_like(z)
    for coefficient in _SERIES:
        rest = (rest + coefficient) * z
    tail = rest.log1p() - x.log() - 0.5 * x * x - 0.5 * math.log(2 * math.pi)
    return torch.where(far, tail, torch.special.log_ndtr(torch.where(far, -_FAR, u)))


GAUSSIAN = known(
    Family(
        name="gaussian",
        kernel="gaussian",
        f=_cdf,
        inverse=torch.special.ndtri,
        slope=_density,
        entropy=_density,
        density=_bell,
        bend=14.5,  # F is 0 in float32 beyond
        quick=Quick(_write, _write_bell, _sums, _line),
        log_f=_log_cdf,
        log_slope=lambda u: -0.5 * u * u - 0.5 * math.log(2 * math.pi),
    )
)


@relaxation(
    "gaussian",
    kind="mask",
    cost="O(n)",
    paper="the threshold scheme with the normal law",
    grad_k=True,
    native_half=True,
    family=lambda: GAUSSIAN,
    ordinary=ordinary(GAUSSIAN),
)
def gaussian_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1) -> Tensor:
    r"""Gaussian top-k: the threshold scheme with the normal distribution function.

    .. math:: y_i = \Phi(x_i / \tau + c), \quad \textstyle\sum_i y_i = k

    Its tails are lighter than the sigmoid's: far items weigh, and learn, less.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature; the limit 0 is the hard top-k.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> gaussian_topk(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.5)
        tensor([0.9987, 0.1593, 0.8420])
    """
    return solve_mask(scores, k, tau, GAUSSIAN)
