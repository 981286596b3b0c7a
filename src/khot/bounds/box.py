"""Intervals, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from khot.bounds._rounding import EPS, WORK, outward, room
from khot.bounds.domain import Band, Map, Product


@final
@dataclass(frozen=True)
class Box:
    """Every entry between ``lower`` and ``upper``, both ``(B, ...)`` in float64.

    Example:
        >>> Box.around(torch.tensor([[1.0, 2.0]]), 0.5).upper
        tensor([[1.5000, 2.5000]], dtype=torch.float64)
    """

    lower: Tensor
    upper: Tensor

    @staticmethod
    def around(x: Tensor, eps: float | Tensor) -> Box:
        """All inputs within ``eps`` of ``x``, entry by entry."""
        wide = x.detach().to(WORK)
        return Box(wide - eps, wide + eps)

    @property
    def shape(self) -> torch.Size:
        return self.lower.shape

    @property
    def middle(self) -> Tensor:
        return (self.lower + self.upper) / 2

    @property
    def radius(self) -> Tensor:
        half = (self.upper - self.lower) / 2
        return half + room(half + self.middle.abs())

    def ends(self, dtype: torch.dtype = WORK) -> tuple[Tensor, Tensor]:
        """``lower`` and ``upper``, rounded outward to ``dtype``."""
        return outward(self.lower, self.upper, dtype)

    def linear(self, f: Map, f_abs: Map | None = None, terms: int = 1) -> Box:
        """A linear map; ``f_abs`` is the same with absolute coefficients, ``terms`` how many numbers an output adds up."""
        # |f(v) - f(middle)| <= f_abs(radius).
        f_abs = f_abs or f
        middle, radius = self.middle, self.radius
        return _box(f(middle), f_abs(radius) + room(f_abs(middle.abs() + radius), terms))

    def view(self, f: Map) -> Box:
        """Entries taken or moved, as indexing, transposing and reshaping do."""
        return Box(f(self.lower), f(self.upper))

    def scale(self, by: Tensor) -> Box:
        """Times a constant, entry by entry, ``(B, ...)`` with as many dimensions."""
        return self.linear(lambda t: t * by, lambda t: t * by.abs())

    def shift(self, by: Tensor) -> Box:
        return Box(self.lower + by - room(self.lower.abs() + by.abs()), self.upper + by + room(self.upper.abs() + by.abs()))

    def plus(self, other: Box) -> Box:
        lower, upper = self.lower + other.lower, self.upper + other.upper
        return Box(lower - room(self.lower.abs() + other.lower.abs()), upper + room(self.upper.abs() + other.upper.abs()))

    def band(self, band: Band) -> Box:
        return Box(band.lower, band.upper)

    def bilinear(self, other: Box, f: Product, terms: int = 1) -> Box:
        """``f(x, y)``, linear in each; ``f`` itself must have coefficients 0 and 1 only, as a (matrix) product has."""
        # With x = a + dx and y = b + dy: |f(x, y) - f(a, b)| <= f(|a|, |dy|) + f(|dx|, |b|) + f(|dx|, |dy|).
        a, b, dx, dy = self.middle, other.middle, self.radius, other.radius
        size = f(a.abs() + dx, b.abs() + dy)
        return _box(f(a, b), f(a.abs(), dy) + f(dx, b.abs() + dy) + room(size, terms + 2))

    def square(self) -> Box:
        big = torch.maximum(self.lower.abs(), self.upper.abs()).square()
        small = torch.where((self.lower <= 0) & (self.upper >= 0), 0.0, torch.minimum(self.lower.abs(), self.upper.abs()).square())
        return Box((small - room(small)).clamp(min=0), big + room(big))

    def meet(self, lower: Tensor | float, upper: Tensor | float) -> Box:
        """What is left when the value is also known to lie between ``lower`` and ``upper``."""
        low, high = (torch.as_tensor(end, dtype=WORK, device=self.lower.device) for end in (lower, upper))
        return Box(torch.fmax(self.lower, low), torch.fmin(self.upper, high))  # an end that overflowed to nan is not known

    def cap(self, limit: float) -> Box:
        """Bounds of the value cut off at ``limit`` on both sides."""
        return Box(self.lower.clamp(-limit, limit), self.upper.clamp(-limit, limit))

    def name_slack(self) -> Box:
        """The same: intervals know nothing of where their width comes from."""
        return self

    def loosen(self, by: Tensor) -> Box:
        """The value give or take ``by``."""
        return Box(self.lower - by - room(by + self.lower.abs()), self.upper + by + room(by + self.upper.abs()))

    def constant(self, value: Tensor) -> Box:
        """A tensor without uncertainty, ``(B, ...)``."""
        wide = value.detach().to(WORK).expand(self.shape[0], *value.shape[1:])
        return Box(wide, wide)

    def beside(self, others: Sequence[Box], dim: int) -> Box:
        """This bound and the others along ``dim``, counted from the last."""
        parts = [self, *others]
        return Box(torch.cat([part.lower for part in parts], dim), torch.cat([part.upper for part in parts], dim))

    def or_else(self, others: Sequence[Box]) -> Box:
        """This bound or one of the others."""
        lower, upper = self.lower, self.upper
        for other in others:
            lower, upper = torch.minimum(lower, other.lower), torch.maximum(upper, other.upper)
        return Box(lower, upper)


def _box(middle: Tensor, radius: Tensor) -> Box:
    radius = radius * (1 + 4 * EPS) + room(middle.abs())
    return Box(middle - radius, middle + radius)
