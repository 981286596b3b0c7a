r"""The two domains: intervals, and linear forms of the input.

A bound encloses all values that a tensor takes while the input moves by :math:`\varepsilon \xi`, :math:`\xi \in [-1, 1]^m`:

- :class:`Box`: :math:`l \le v \le u`, each entry by itself;
- :class:`Affine`: :math:`v = c + \sum_j A_j \xi_j + e`, :math:`|e| \le r`. Entries that depend on the same input share its :math:`\xi`, so
  that differences and sums of them cancel as they do in truth. It carries a box as well, the intersection of its own ends with what
  intervals alone would give, and so is never looser than :class:`Box`.

Both have the same few operations, from which :mod:`khot.bounds.layers` and :mod:`khot.bounds.selection` are made:
``linear`` (a linear map), ``scale`` and ``shift`` (constants), ``band`` (an elementwise function between two parallel lines), ``bilinear`` (a
product), ``plus``, ``meet`` (a box that is known to hold as well). The first dimension is the batch; maps act on the others, counted
from the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from khot.bounds._rounding import EPS, WORK, outward, room

Map = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Band:
    """``|f(x) - slope x - offset| <= slack`` and ``lower <= f(x) <= upper`` for x between two ends."""

    slope: Tensor
    offset: Tensor
    slack: Tensor
    lower: Tensor
    upper: Tensor


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
        return Box(torch.clamp(self.lower, min=lower), torch.clamp(self.upper, max=upper))  # pyright: ignore[reportCallIssue, reportArgumentType]

    def cap(self, limit: float) -> Box:
        """Bounds of the value cut off at ``limit`` on both sides."""
        return Box(self.lower.clamp(-limit, limit), self.upper.clamp(-limit, limit))


@final
@dataclass(frozen=True)
class Affine:
    """``centre + sum_j form[:, j] xi_j``, off by at most ``slack``, and inside ``box``.

    ``centre`` and ``slack`` are ``(B, ...)``, ``form`` is ``(B, m, ...)`` for m numbers of the input.

    Example:
        >>> x = Affine.around(torch.tensor([[1.0, 2.0]]), 0.5)
        >>> x.plus(x.linear(lambda t: -t, lambda t: t)).upper.max().item() < 1e-12  # x - x is 0, which intervals do not know
        True
    """

    centre: Tensor
    form: Tensor
    slack: Tensor
    box: Box

    @staticmethod
    def around(x: Tensor, eps: float | Tensor) -> Affine:
        """All inputs within ``eps`` of ``x``, entry by entry: one unknown for each entry."""
        wide = x.detach().to(WORK)
        n = wide[0].numel()
        eye = torch.eye(n, dtype=WORK, device=x.device).view(1, n, *wide.shape[1:])
        return affine(wide, (eye * eps).expand(len(wide), n, *wide.shape[1:]), room(wide.abs() + eps), Box.around(x, eps))

    @property
    def shape(self) -> torch.Size:
        return self.centre.shape

    @property
    def lower(self) -> Tensor:
        return self.box.lower

    @property
    def upper(self) -> Tensor:
        return self.box.upper

    @property
    def reach(self) -> Tensor:
        """How far the value may be from the centre."""
        return self.form.abs().sum(1) + self.slack

    def ends(self, dtype: torch.dtype = WORK) -> tuple[Tensor, Tensor]:
        """``lower`` and ``upper``, rounded outward to ``dtype``."""
        return self.box.ends(dtype)

    def linear(self, f: Map, f_abs: Map | None = None, terms: int = 1) -> Affine:
        """A linear map; ``f_abs`` is the same with absolute coefficients, ``terms`` how many numbers an output adds up."""
        f_abs = f_abs or f
        size = f_abs(self.centre.abs() + self.reach)
        return affine(f(self.centre), f(self.form), f_abs(self.slack) + room(size, terms), self.box.linear(f, f_abs, terms))

    def scale(self, by: Tensor) -> Affine:
        """Times a constant, entry by entry, ``(B, ...)`` with as many dimensions."""
        size = by.abs() * (self.centre.abs() + self.reach)
        return affine(self.centre * by, self.form * by.unsqueeze(1), self.slack * by.abs() + room(size), self.box.scale(by))

    def shift(self, by: Tensor) -> Affine:
        centre = self.centre + by
        return affine(centre, self.form, self.slack + room(centre.abs() + by.abs()), self.box.shift(by))

    def plus(self, other: Affine) -> Affine:
        slack = self.slack + other.slack + room(self.centre.abs() + self.reach + other.centre.abs() + other.reach)
        return affine(self.centre + other.centre, self.form + other.form, slack, self.box.plus(other.box))

    def band(self, band: Band) -> Affine:
        """A function between two parallel lines: the lines are its linear form, half their distance is its slack."""
        slope = band.slope.unsqueeze(1)
        slack = band.slope.abs() * self.slack + band.slack
        size = band.slope.abs() * (self.centre.abs() + self.reach) + band.offset.abs()
        return affine(band.slope * self.centre + band.offset, slope * self.form, slack + room(size, 4), self.box.band(band))

    def bilinear(self, other: Affine, f: Product, terms: int = 1) -> Affine:
        """``f(x, y)``, linear in each; ``f`` itself must have coefficients 0 and 1 only, as a (matrix) product has."""
        # (a + dx)(b + dy) = ab + a dy + b dx + dx dy. The middle terms are linear forms, the last one is slack.
        a, b, dx, dy = self.centre, other.centre, self.reach, other.reach
        form = f(self.form, b.unsqueeze(1)) + f(a.unsqueeze(1), other.form)
        slack = f(a.abs(), other.slack) + f(self.slack, b.abs()) + f(dx, dy)
        size = f(a.abs() + dx, b.abs() + dy)
        return affine(f(a, b), form, slack + room(size, terms + 4), self.box.bilinear(other.box, f, terms))

    def square(self) -> Affine:
        # dx^2 lies between 0 and reach^2: its middle goes to the centre.
        half = self.reach.square() / 2
        size = (self.centre.abs() + self.reach).square()
        slack = 2 * self.centre.abs() * self.slack + half
        form = 2 * self.centre.unsqueeze(1) * self.form
        return affine(self.centre.square() + half, form, slack + room(size, 4), self.box.square())

    def meet(self, lower: Tensor | float, upper: Tensor | float) -> Affine:
        """What is left when the value is also known to lie between ``lower`` and ``upper``."""
        return affine(self.centre, self.form, self.slack, self.box.meet(lower, upper))

    def cap(self, limit: float) -> Affine:
        """Bounds of the value cut off at ``limit`` on both sides; an entry that reaches it is no linear form any more."""
        box = self.box.cap(limit)
        cut = ~((self.lower > -limit) & (self.upper < limit))  # nan is cut too
        centre, slack = torch.where(cut, box.middle, self.centre), torch.where(cut, box.radius, self.slack)
        return affine(centre, self.form.masked_fill(cut.unsqueeze(1), 0.0), slack, box)


Bound = TypeVar("Bound", Box, Affine)


def affine(centre: Tensor, form: Tensor, slack: Tensor, box: Box) -> Affine:
    """An :class:`Affine` whose box is met with its own ends; entries whose form overflowed fall back to their box."""
    reach = form.abs().sum(1) + slack
    reach = reach + room(reach, form.shape[1])
    lost = ~(reach + centre.abs()).isfinite()
    if bool(lost.any()):
        centre, slack = torch.where(lost, box.middle, centre), torch.where(lost, box.radius, slack)
        form = form.masked_fill(lost.unsqueeze(1), 0.0)
        reach = torch.where(lost, slack, reach)
    return Affine(centre, form, slack, Box(torch.maximum(box.lower, centre - reach - room(centre.abs())),
                                           torch.minimum(box.upper, centre + reach + room(centre.abs()))))  # fmt: skip


def _box(middle: Tensor, radius: Tensor) -> Box:
    radius = radius * (1 + 4 * EPS) + room(middle.abs())
    return Box(middle - radius, middle + radius)
