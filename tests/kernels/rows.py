"""Rows that are hard on a solver, and a truth that keeps its precision on all of them."""

from __future__ import annotations

from collections.abc import Callable

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


def truth(x: np.ndarray, k: float, tau: float, family: str | Callable[..., np.ndarray]) -> np.ndarray:
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
    cdf = CDFS[family] if isinstance(family, str) else family
    shift = _bisect(z, rest, cdf)
    y = np.where(x == np.inf, 1.0, 0.0)
    y[np.isfinite(x)] = cdf(z + shift)
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


def steps(family: str, u: Tensor) -> Tensor:
    """F in torch, as slow and plain as it can be."""
    if family == "euclidean":
        return (u + 0.5).clamp(0, 1)
    if family == "laplace":
        tail = 0.5 * torch.exp(-u.abs())
        return torch.where(u < 0, tail, 1 - tail)
    return torch.special.ndtr(u) if family == "gaussian" else torch.sigmoid(u)


def arguments(x: Tensor, k: Tensor, tau: Tensor, family: str) -> Tensor:
    """``u`` of every score in float64, ``(R, n)`` with a ``(R,)`` column of k and tau, by bisection alone.

    Scores are counted from the one at the threshold, which keeps their differences exact; the interval is halved in the order of
    floating-point numbers, which reaches every scale in as many steps as a number has bits.
    """
    small = k <= x.shape[-1] / 2  # the smaller of the two sums is the more precise
    sign, target = torch.where(small, 1.0, -1.0).double()[:, None], torch.where(small, k, x.shape[-1] - k)
    centre = x.sort(-1, descending=True).values.gather(1, (k.ceil().long() - 1)[:, None])
    z = ((x - centre) / tau[:, None]).clamp(-1e300, 1e300)
    low, high = torch.full_like(centre, -1e300), torch.full_like(centre, 1e300)
    for _ in range(66):
        middle = _between(low, high)
        total = steps(family, sign * (z + middle)).sum(-1)
        below = torch.where(small, total < target, total > target)[:, None]
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return z + low


def _between(low: Tensor, high: Tensor) -> Tensor:
    a, b = (_mirrored(end.view(torch.int64)) for end in (low, high))
    return _mirrored((a & b) + ((a ^ b) >> 1)).view(torch.float64)


def _mirrored(bits: Tensor) -> Tensor:
    """Bits of a float to its rank among floats, and back."""
    return torch.where(bits < 0, torch.iinfo(torch.int64).min - bits, bits)


def fuzzed(kind: str, count: int, n: int, generator: torch.Generator) -> Tensor:
    """``(count, n)`` scores of a hostile kind, each row at a scale of its own between 1e-30 and 1e30."""
    normal, uniform = (draw(count, n, generator=generator, dtype=torch.float64) for draw in (torch.randn, torch.rand))
    scale = 10 ** (60 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 30)
    split = torch.arange(n) < torch.randint(0, n + 1, (count, 1), generator=generator)
    cauchy = torch.tan(torch.pi * (uniform - 0.5))
    first = torch.arange(n) == 0
    return {
        "normal": lambda: normal,
        "scaled": lambda: scale * normal,
        "log-normal": lambda: torch.exp(6 * normal),
        "minus log-normal": lambda: -torch.exp(6 * normal),
        "cauchy": lambda: cauchy,
        "scaled cauchy": lambda: (scale * cauchy).clamp(-1e36, 1e36),
        "ties": lambda: (2 * normal).round(),
        "scaled ties": lambda: (2 * normal).round() * scale,
        "stepped": lambda: (4 * uniform).floor() * scale.sqrt(),
        "plateau": lambda: torch.where(split, scale, 0.0),
        "two clusters": lambda: torch.where(split, scale, -scale) + normal,
        "one high": lambda: torch.where(first, scale, normal),
        "one low": lambda: torch.where(first, -scale, normal),
        "far": lambda: scale + normal,
        "equal": lambda: scale.expand(count, n).clone(),
        "all scales": lambda: normal.sign() * 10 ** (60 * uniform - 30),
    }[kind]()


KINDS = (
    "normal", "scaled", "log-normal", "minus log-normal", "cauchy", "scaled cauchy", "ties", "scaled ties", "stepped", "plateau",
    "two clusters", "one high", "one low", "far", "equal", "all scales",
)  # fmt: skip


def fuzzed_k(count: int, n: int, generator: torch.Generator) -> Tensor:
    """``(count,)`` in float64: tiny, n - tiny, anything between, whole numbers, 1, n minus a few."""
    uniform, power = (torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))
    tiny = 10 ** (-12 * power)
    choices = torch.stack([tiny, n - tiny, n * uniform, (n * uniform).ceil(), torch.ones_like(tiny), n - (3 * uniform).ceil()])
    picked = choices.gather(0, torch.randint(0, len(choices), (1, count), generator=generator))[0]
    return picked.clamp(1e-12, n * (1 - 1e-15))
