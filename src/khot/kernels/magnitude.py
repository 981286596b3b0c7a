"""The native soft shrinkage by magnitude, called through ctypes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._tensors import Number
from khot.kernels import register
from khot.kernels.cpu import LIBRARY, dense, per_row, pointers
from khot.kernels.order import DTYPES, INDEX, POINTER, REAL, WHOLE, done, takes

_NOT_FINITE = 4


def shrink(x: Tensor, k: Number, tau: Number, power: float) -> tuple[Tensor, Tensor] | None:
    """The shrunk values and, as a float64 column, the thresholds; ``None`` where a value is not finite.

    Args:
        x: ``(..., n)``.
        k: a number or a ``(..., 1)`` column.
        tau: a number or a ``(..., 1)`` column.
        power: of the shares, 1 / (p - 1).
    """
    x = dense(x)
    y, t = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float64)
    (k_rows, k), (tau_rows, tau) = per_row(k, x), per_row(tau, x)
    at = pointers(x, k_rows, tau_rows, y, t)
    code = LIBRARY.khot_magnitude(
        DTYPES[x.dtype], at[0], at[1], k, at[2], tau, power, at[3], at[4], math.prod(x.shape[:-1]), x.shape[-1], torch.get_num_threads()
    )
    if code == _NOT_FINITE:
        return None
    done(code)
    return y, t


def _takes(x: Tensor, k: Number, tau: Number) -> bool:
    return takes(x) and all(not isinstance(value, Tensor) or takes(value) for value in (k, tau))


if LIBRARY:
    LIBRARY.khot_magnitude.argtypes = [
        WHOLE, POINTER, POINTER, REAL, POINTER, REAL, REAL, POINTER, POINTER, INDEX, INDEX, WHOLE
    ]  # fmt: skip
    register("magnitude", _takes, shrink)
