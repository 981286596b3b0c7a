"""What one member of the threshold family is, and how it is found again by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from khot._record import record

_builders: dict[str, Callable[[float], Family]] = {}


def logit_line(mean: Tensor) -> tuple[Tensor, Tensor]:
    """A function of the mean of a mask that is nearly straight in the threshold, and the reciprocal of its slope in the mean."""
    return torch.logit(mean), torch.addcmul(mean, mean, mean, value=-1)


class Quick(NamedTuple):
    """A smooth or sharp family's passes over rows in memory, in place: ``out`` and ``free`` are buffers."""

    f: Callable[[Tensor, Tensor], Tensor]  # (u, out): F(u) to the last digit; a smooth family may overwrite u
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]  # (u, y, out): F'(u) to a few digits from what f left in u, and y = F(u)
    sums: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (u, free): of F(u) and F'(u) over rows, to a few digits; overwrites u
    line: Callable[[Tensor], tuple[Tensor, Tensor]] = logit_line  # see there
    bow: float = 0.125  # the error after a Newton step on it is mostly less than so many squares of the step


@record
class Family:
    """An increasing squashing function ``F`` from the reals to [0, 1]."""

    name: str
    kernel: str  # the name of its native code, "none" where there is none
    f: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]  # F' as a function of y = F(u)
    entropy: Callable[[Tensor], Tensor]  # minus the integral of the inverse from 0 to y
    smooth: bool = True  # F' is Lipschitz and F(-u) = 1 - F(u) with tails like exponentials
    alpha: float = 0.0  # the family's parameter, where it has one
    density: Callable[[Tensor], Tensor] | None = None  # F' as a function of u, where that is cheaper
    curve: Callable[[], Any] | None = None  # what that code wants besides, see khot.kernels.curve
    log_f: Callable[[Tensor], Tensor] | None = None  # log F(u) with its digits, where F never reaches 0
    log_slope: Callable[[Tensor], Tensor] | None = None  # log F'(u), likewise
    bend: float = 1.0  # |F''| is at most so many times F' wherever F is not 0 in floating point; of smooth families
    quick: Quick | None = None  # the same in place, where that is faster

    def slope_at(self, u: Tensor, y: Tensor) -> Tensor:
        """``F'`` at ``u``, where ``y = F(u)`` is known."""
        return self.slope(y) if self.density is None else self.density(u)

    def measure(self, u: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        """What ``F(u)`` and ``F'(u)`` sum to over rows, to a few digits. Both arguments are buffers that may be overwritten."""
        if self.quick is not None:
            return self.quick.sums(u, free)
        y = self.f(u)
        return y.sum(-1, keepdim=True), self.slope_at(u, y).sum(-1, keepdim=True)

    def write(self, u: Tensor, out: Tensor) -> Tensor:
        """``F(u)`` in ``out``."""
        return out.copy_(self.f(u)) if self.quick is None else self.quick.f(u, out)

    def write_slope(self, u: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """``F'(u)`` to a few digits in ``out``, after :meth:`write` left ``y = F(u)``."""
        return out.copy_(self.slope_at(u, y)) if self.quick is None else self.quick.slope(u, y, out)


def known(family: Family) -> Family:
    """File a family without parameter under its name."""
    _builders[family.name] = lambda alpha: family
    return family


def builds(name: str) -> Callable[[Callable[[float], Family]], Callable[[float], Family]]:
    """File the decorated function of ``alpha`` under ``name``; a family is made once for each ``alpha``."""

    def file(builder: Callable[[float], Family]) -> Callable[[float], Family]:
        kept = functools.cache(builder)

        @functools.wraps(builder)
        def build(alpha: float) -> Family:
            return builder(alpha) if is_compiling() else kept(alpha)  # Dynamo looks into a cache, and warns of it

        _builders[name] = build
        return build

    return file


def family_of(name: str, alpha: float) -> Family:
    """The family that carries this name and parameter: what an operator knows of it."""
    return _builders[name](alpha)


def inside_only(y: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """``f(y)`` where ``0 < y < 1`` and 0 at both ends, where its derivatives are infinite."""
    inside = (y > 0) & (y < 1)
    return torch.where(inside, f(torch.where(inside, y, 0.5)), 0.0)
