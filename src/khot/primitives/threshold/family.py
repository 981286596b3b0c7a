"""What one member of the threshold family is, and how it is found again by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_builders: dict[str, Callable[[float], Family]] = {}


@dataclass(frozen=True, eq=False, repr=False)
class Family:
    """An increasing squashing function ``F`` from the reals to [0, 1]."""

    name: str
    f: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]  # F' as a function of y = F(u)
    entropy: Callable[[Tensor], Tensor]  # minus the integral of the inverse from 0 to y
    smooth: bool = True  # F' is Lipschitz and F(-u) = 1 - F(u) with tails like exponentials
    alpha: float = 0.0  # the family's parameter, where it has one
    density: Callable[[Tensor], Tensor] | None = None  # F' as a function of u, where that is cheaper
    kernel: str = ""  # the name of its native code; its own name if empty
    curve: Callable[[], Any] | None = None  # what that code wants besides, see khot.kernels.curve
    log_f: Callable[[Tensor], Tensor] | None = None  # log F(u) with its digits, where F never reaches 0
    log_slope: Callable[[Tensor], Tensor] | None = None  # log F'(u), likewise

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", self.kernel or self.name)

    def slope_at(self, u: Tensor, y: Tensor) -> Tensor:
        """``F'`` at ``u``, where ``y = F(u)`` is known."""
        return self.slope(y) if self.density is None else self.density(u)


def known(family: Family) -> Family:
    """File a family without parameter under its name."""
    _builders[family.name] = lambda alpha: family
    return family


def builds(name: str) -> Callable[[Callable[[float], Family]], Callable[[float], Family]]:
    """File the decorated function of ``alpha`` under ``name``."""

    def file(builder: Callable[[float], Family]) -> Callable[[float], Family]:
        _builders[name] = builder
        return builder

    return file


def family_of(name: str, alpha: float) -> Family:
    """The family that carries this name and parameter: what an operator knows of it."""
    return _builders[name](alpha)


def inside_only(y: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """``f(y)`` where ``0 < y < 1`` and 0 at both ends, where its derivatives are infinite."""
    inside = (y > 0) & (y < 1)
    return torch.where(inside, f(torch.where(inside, y, 0.5)), 0.0)
