r"""Joint inclusion probabilities of all pairs at once.

With the coins of :mod:`khot.primitives.tilt`, the generating function of the number of heads on the unit circle is
:math:`P(\omega) = \prod_i f_i(\omega)`, :math:`f_i(\omega) = 1 - p_i + p_i \omega`, and a mean over points of the circle picks a
coefficient. Without the coins i and j the two factors are divided out, so that

.. math:: \pi_{ij} = \frac{1}{M \Pr[k]} \sum_m \omega_m^{-k} P(\omega_m) a_i(\omega_m) a_j(\omega_m), \quad
          a_i = \frac{p_i \omega}{f_i(\omega)} ,

one product of an n x M matrix with its transpose. M need not be n + 1: the mean over M points sees the coefficients at distance M, 2M,
... too, and by Bernstein's inequality these are below rounding for M of about 9 standard deviations. An odd M keeps away from -1, the
one place where a factor can vanish.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._tensors import readable
from khot.primitives.tilt import Coins, tilt

_LOG_EPS = 44.0  # - log of what may be neglected, 1e-19: a hundredth of the rounding, beside a probability of 1/n or more
_PIECE = 1 << 20  # entries of the result that are worked on at once


def pair_probs(logits: Tensor, k: Tensor | int, mean: Tensor) -> Tensor:
    r"""Probabilities ``(..., n, n)`` that both items are in the subset, with ``mean`` on the diagonal. O(n^2 sqrt(k)).

    The error of an entry is a few roundings of :math:`p_i p_j / \Pr[k]`, with the tilted coins. Differentiable any number of times.

    Args:
        logits: ``(..., n)``.
        k: a whole number, or ``(..., 1)`` whole numbers.
        mean: ``(..., n)`` inclusion probabilities; the result has their dtype.

    Example:
        >>> pair_probs(torch.zeros(4), 2, torch.full((4,), 0.5))[0]
        tensor([0.5000, 0.1667, 0.1667, 0.1667])
    """
    n = logits.shape[-1]
    coins = tilt(logits, k)
    p = coins.tails_heads.movedim(-1, 1).unsqueeze(-1)  # (2, R, n, 1)
    real, imag, weight_real, weight_imag = _circle(p[0], p[1], coins, _angles(coins))
    total = weight_real.sum(-1, keepdim=True)
    a, b = weight_real / total, weight_imag / total  # (R, 1, H)
    left = torch.cat((a * real - b * imag, -a * imag - b * real), -1)  # (R, n, 2 H)
    right = torch.cat((real, imag), -1)
    step = max(1, _PIECE // max(1, n * n))  # pieces that stay in cache: fresh memory for all pairs in double precision is slow
    parts = zip(left.split(step), right.split(step), mean.reshape(len(left), n).split(step), strict=True)
    return torch.cat([_finish(*part) for part in parts]).reshape(*logits.shape, n)


def _finish(left: Tensor, right: Tensor, mean: Tensor) -> Tensor:
    own = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
    return torch.where(own, mean.unsqueeze(-1), (left @ right.mT).clamp(min=0).to(mean.dtype))


def _angles(coins: Coins) -> Tensor:
    """The upper half of M points of the circle; the lower half is its mirror image."""
    n = coins.tails_heads.shape[1]
    points, variance = n + 1, coins.tails_heads.detach().prod(0).sum(0)
    if readable(variance) and variance.numel():
        # M^2 / 2 = _LOG_EPS (variance + M / 3), and 3 more as two coins are missing
        points = min(points, 3 + math.ceil(_LOG_EPS / 3 + math.sqrt(_LOG_EPS**2 / 9 + 2 * _LOG_EPS * float(variance.max()))))
    points += 1 - points % 2
    half = torch.arange(points // 2 + 1, dtype=variance.dtype, device=variance.device)
    return half * (2 * math.pi / points)


def _circle(q: Tensor, p: Tensor, coins: Coins, angle: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r""":math:`a_i`, ``(R, n, H)``, and :math:`\omega^{-k} P(\omega)`, ``(R, 1, H)``, real and imaginary parts."""
    cos, sin = angle.cos(), angle.sin()
    size = (q - p).square() + 4 * p * q * (angle / 2).cos().square()  # |f|^2
    real, imag = p * (p + q * cos) / size, p * q * sin / size
    # Phases less their mean p_i angle are small, and so are their roundings.
    phase = (torch.atan2(p * sin, q + p * cos) - p * angle).sum(-2, keepdim=True)
    phase = phase + (p.sum(-2, keepdim=True) - coins.k.view(-1, 1, 1)) * angle
    length = (size.log().sum(-2, keepdim=True) / 2).exp() * torch.where(angle > 0, 2.0, 1.0)  # mirror images count too
    return real, imag, length * phase.cos(), length * phase.sin()
