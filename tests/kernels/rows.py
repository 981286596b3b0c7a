"""Rows that are hard on a solver, and a truth that keeps its precision on all of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.oracles import CDFS

FAMILIES = ("sigmoid", "euclidean", "laplace", "gaussian")


def hostile(n: int, seed: int = 0) -> dict[str, Tensor]:
    """Named rows of ``n`` scores in float64 whose values float32 can hold."""
    g = torch.Generator().manual_seed(seed)
    normal, uniform = torch.randn(n, generator=g), torch.rand(n, generator=g)
    half = torch.arange(n) % 2 == 0
    rows = {
        "normal": normal,
        "wide": 100 * normal,
        "cauchy": torch.tan(torch.pi * (uniform - 0.5)).clamp(-1e9, 1e9),
        "far": 1e6 + normal,
        "huge": 1e30 * normal,
        "tied": torch.full((n,), 3.7),
        "few values": (4 * uniform).floor(),
        "outlier": torch.cat([normal[:-1], torch.tensor([1e30])]),
        "two clusters": torch.where(half, -1000.0, 1000.0) + normal,
        "sorted": normal.sort().values,
        "tiny": 1e-30 * normal,
        "excluded": torch.where(uniform < 0.3, -torch.inf, normal),
        "certain": torch.where(uniform < 0.1, torch.inf, normal),
        "both": torch.where(uniform < 0.2, torch.inf, torch.where(uniform > 0.7, -torch.inf, 100 * normal)),
        "all certain": torch.full((n,), torch.inf),
        "all excluded": torch.full((n,), -torch.inf),
        "nan": torch.where(torch.arange(n) == n // 2, torch.nan, normal),
    }
    return {name: row.float().double() for name, row in rows.items()}


def truth(x: np.ndarray, k: float, tau: float, family: str) -> np.ndarray:
    """One row in float64, with the meaning of infinities and of the ends of k; bisection about a score near the threshold."""
    if np.isnan(x).any():
        return np.full_like(x, np.nan)
    present, certain = (x > -np.inf).sum(), (x == np.inf).sum()
    if k >= present:
        return np.where(x == -np.inf, 0.0, 1.0)
    if k <= certain:
        return np.where(x == np.inf, k / max(certain, 1), 0.0)
    finite, rest = x[np.isfinite(x)], k - certain
    centre = np.sort(finite)[::-1][int(np.ceil(rest)) - 1]
    z = np.clip((finite - centre) / tau, -1e300, 1e300)
    shift = _bisect(z, rest, CDFS[family])
    y = np.where(x == np.inf, 1.0, 0.0)
    y[np.isfinite(x)] = CDFS[family](z + shift)
    return y


def _bisect(z: np.ndarray, k: float, cdf) -> float:
    small = k <= len(z) / 2

    def excess(shift: float) -> float:  # the smaller of the two sums is the more precise
        total = cdf(z + shift if small else -z - shift).sum(dtype=np.longdouble)
        return float(total - k if small else (len(z) - k) - total)

    low, high = -1.0, 1.0
    while excess(low) > 0:
        low *= 2
    while excess(high) < 0:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return low


def counts(n: int) -> list[float]:
    """Values of k worth trying: the ends, fractions, small, half, nearly everything."""
    return sorted({k for k in (0.0, 1e-3, 0.3, 1.0, 2.5, 8.0, n / 16, n / 2, n - 1.0, n - 0.25, float(n)) if 0 <= k <= n})
