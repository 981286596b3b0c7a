"""A squashing function as a table for the native code: what :file:`native/curve.h` reads."""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

OCTAVES = 126  # of the argument, from 1 down to the smallest normal float
_TERMS = {torch.float32: 11, torch.float64: 23}  # of the polynomial on each: enough for the digits of the dtype


class _Layout(ctypes.Structure):
    _fields_ = [("a", ctypes.c_double), ("singles", ctypes.c_void_p), ("doubles", ctypes.c_void_p)]


class Curve(NamedTuple):
    """What a native family wants besides its name: the number that divides tau, and the table where there is no closed form."""

    scale: float
    table: Any = None  # the address of its layout
    memory: tuple[Tensor, ...] = ()  # what the layout points to


def fit(a: float, scale: float, log_tail: Callable[[Tensor], Tensor]) -> Curve:
    """The table of a family with the parameter ``a``, given log2 of its tail for arguments in (0, 1] in float64."""
    singles, doubles = (_coefficients(log_tail, terms).to(dtype).contiguous() for dtype, terms in _TERMS.items())
    return Curve(scale, ctypes.byref(_Layout(a, singles.data_ptr(), doubles.data_ptr())), (singles, doubles))


def _coefficients(log_tail: Callable[[Tensor], Tensor], terms: int) -> Tensor:
    """``(terms, OCTAVES)``: the polynomial in ``x`` on every octave ``u = (x + 3) / 4 * 2^-i``, through its values at Chebyshev's nodes."""
    order = torch.arange(terms, dtype=torch.float64, device="cpu")
    angle = (order + 0.5) * (math.pi / terms)
    octave = torch.arange(OCTAVES, dtype=torch.float64, device="cpu")
    values = log_tail((angle.cos()[:, None] + 3) * 2 ** (-octave - 2))  # (terms, OCTAVES)
    chebyshev = torch.cos(order[:, None] * angle) @ values * (2 / terms)
    chebyshev[0] /= 2
    return _powers(terms).T @ chebyshev


def _powers(terms: int) -> Tensor:
    """``(terms, terms)``: row j holds the coefficients of Chebyshev's polynomial T_j, the lowest first."""
    rows = torch.zeros(terms, terms, dtype=torch.float64, device="cpu")
    rows[0, 0] = rows[1, 1] = 1
    for j in range(2, terms):  # T_j = 2 x T_(j-1) - T_(j-2)
        rows[j, 1:] = 2 * rows[j - 1, :-1]
        rows[j] -= rows[j - 2]
    return rows
