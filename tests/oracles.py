"""Slow truths that share no code with the library."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor


def entmax_cdf(alpha: float):
    a = alpha - 1

    def f(u: np.ndarray) -> np.ndarray:  # centred: F(0) = 1/2
        u = np.asarray(u, dtype=np.float64)
        low, high = np.zeros_like(u), np.ones_like(u)
        for _ in range(60):
            p = (low + high) / 2
            above = (p**a - (1 - p) ** a) / (a * 2**a) > u
            low, high = np.where(above, low, p), np.where(above, p, high)
        return (low + high) / 2

    return f


CDFS = {
    "sigmoid": special.expit,
    "euclidean": lambda u: np.clip(u + 0.5, 0, 1),
    "laplace": lambda u: np.where(u < 0, 0.5 * np.exp(np.minimum(u, 0)), 1 - 0.5 * np.exp(-np.maximum(u, 0))),
    "gaussian": special.ndtr,
    "entmax": entmax_cdf(1.5),
}


def bisect(scores: Tensor, k: float, tau: float, cdf) -> Tensor:
    """The threshold scheme by 100 bisections in float64, one row at a time."""
    rows = scores.double().reshape(-1, scores.shape[-1]).numpy() / tau
    out = []
    for x in rows:
        low, high = -x.max() - 60.0, -x.min() + 60.0
        for _ in range(100):
            shift = (low + high) / 2
            if math.fsum(cdf(x + shift)) > k:
                high = shift
            else:
                low = shift
        out.append(cdf(x + (low + high) / 2))
    return torch.from_numpy(np.stack(out)).reshape(scores.shape)


def bisect_exact(scores: list[float], k: float, digits: int = 50) -> list[float]:
    """Sigmoid top-k with many digits."""
    with mpmath.workdps(digits):
        x = [mpmath.mpf(value) for value in scores]
        low, high = -max(x) - 200, -min(x) + 200
        for _ in range(400):
            shift = (low + high) / 2
            if mpmath.fsum(1 / (1 + mpmath.exp(-(value + shift))) for value in x) > k:
                high = shift
            else:
                low = shift
        return [float(1 / (1 + mpmath.exp(-(value + low)))) for value in x]


def variational(scores: np.ndarray, k: float, tau: float, entropy) -> np.ndarray:
    """The regularised maximisation itself, by SLSQP from the centre of the capped simplex."""
    n = len(scores)
    result = optimize.minimize(
        lambda y: -(scores @ y) - tau * entropy(y).sum(),
        np.full(n, k / n),
        bounds=[(1e-12, 1 - 1e-12)] * n,
        constraints={"type": "eq", "fun": lambda y: y.sum() - k},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    return result.x


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
