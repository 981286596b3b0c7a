r"""The two domains: intervals, and linear forms of the input.

A bound encloses all values that a tensor takes while the input moves by :math:`\varepsilon \xi`, :math:`\xi \in [-1, 1]^m`:

- ``Box``: :math:`l \le v \le u`, each entry by itself;
- ``Affine``: :math:`v = c + \sum_j A_j \xi_j + e`, :math:`|e| \le r`. Entries that depend on the same input share its :math:`\xi`, so
  that differences and sums of them cancel as they do in truth. It carries a box as well, the intersection of its own ends with what
  intervals alone would give, and so is never looser than ``Box``.

Both have the same few operations, from which :mod:`khot.bounds.layers` and :mod:`khot.bounds.selection` are made:
``linear`` (a linear map), ``view`` (entries taken or moved), ``scale`` and ``shift`` (constants), ``band`` (an elementwise function
between two parallel lines), ``bilinear`` (a product), ``plus``, ``meet`` (a box that is known to hold as well), ``name_slack`` (the box
remainder as unknowns of their own), ``or_else`` (one of several bounds, it is not known which). The first dimension is the
batch; maps act on the others, counted from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

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


class Domain(Protocol):
    """What :class:`khot.bounds.Box` and :class:`khot.bounds.Affine` have in common; tensors are ``(B, ...)`` in float64."""

    @property
    def lower(self) -> Tensor: ...
    @property
    def upper(self) -> Tensor: ...
    @property
    def middle(self) -> Tensor: ...
    @property
    def shape(self) -> torch.Size: ...
    def ends(self, dtype: torch.dtype = ...) -> tuple[Tensor, Tensor]: ...
    def linear(self, f: Map, f_abs: Map | None = None, terms: int = 1) -> Self: ...
    def view(self, f: Map) -> Self: ...
    def scale(self, by: Tensor) -> Self: ...
    def shift(self, by: Tensor) -> Self: ...
    def plus(self, other: Self) -> Self: ...
    def band(self, band: Band) -> Self: ...
    def bilinear(self, other: Self, f: Product, terms: int = 1) -> Self: ...
    def square(self) -> Self: ...
    def meet(self, lower: Tensor | float, upper: Tensor | float) -> Self: ...
    def cap(self, limit: float) -> Self: ...
    def name_slack(self) -> Self: ...
    def loosen(self, by: Tensor) -> Self: ...
    def constant(self, value: Tensor) -> Self: ...
    def beside(self, others: Sequence[Self], dim: int) -> Self: ...
    def or_else(self, others: Sequence[Self]) -> Self: ...


Bound = TypeVar("Bound", bound=Domain)
