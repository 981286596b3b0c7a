"""Native sampling designs, called through ctypes: one call draws all rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, contiguous_format, empty_like, get_num_threads  # a look into torch itself is slow

from khot._tensors import Number, in_reach
from khot.kernels import register
from khot.kernels.cpu import LIBRARY, dense, per_row, pointers

DESIGNS = {"systematic": 0, "pivotal": 1}
DTYPES = {torch.float32: 0, torch.float64: 1}
_MOST = 2**31 - 2  # items in a row, which are counted in 32 bits
_library: Any = LIBRARY

if LIBRARY:
    _pointer, _index, _whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    _library.khot_draw.argtypes = [
        _whole, _whole, *2 * [_pointer], ctypes.c_double, *2 * [_pointer], ctypes.c_uint64, *3 * [_index], *2 * [_whole]
    ]  # fmt: skip


def draw(design: str, probs: Tensor, k: Number, seed: int, *, shuffled: bool, start: Tensor | None = None, over: bool = False) -> Tensor:
    """A 0/1 mask like ``probs`` with ``k`` ones in every row; nan in a row that has one.

    Args:
        design: a key of :data:`DESIGNS`.
        probs: ``(..., n)``. A first dimension that is expanded holds draws from the same probabilities, which are prepared once.
        k: what the rows sum to, a number or a ``(..., 1)`` column. A fraction draws the whole number below or above; where the sum is
            off by more than half, the sum, rounded, is drawn.
        seed: rows and draws are told apart by their number.
        shuffled: whether every row is put into random order first.
        start: for ``systematic`` the place of the first tooth in units, ``(..., 1)``, in place of a random one.
        over: write the mask over ``probs``, which are dense and nobody's any more: large new memory costs as much as the draw.
    """
    out = probs if over else empty_like(probs, memory_format=contiguous_format)
    draws = 1
    if probs.ndim > 1 and probs.stride(0) == 0 and (not isinstance(k, Tensor) or k.ndim == probs.ndim and k.stride(0) == 0):
        draws, probs, k = probs.shape[0], probs[0], k[0] if isinstance(k, Tensor) else k
    probs = dense(probs)
    n = probs.shape[-1]
    # The plain call spelled out: each call of a helper costs as much as a hundred items.
    k_rows, k_value = (None, k) if type(k) is float else per_row(k, probs)
    start = None if start is None else dense(start.to(torch.int64))
    k_at, start_at = (None, None) if k_rows is start is None else pointers(k_rows, start)
    code = _library.khot_draw(
        DESIGNS[design], DTYPES[probs.dtype], probs.data_ptr(), k_at, k_value, start_at, out.data_ptr(), seed, draws,
        probs.numel() // n if n else 0, n, shuffled, get_num_threads(),
    )  # fmt: skip
    if code:
        raise MemoryError("no memory to draw in; take fewer or shorter rows at once") if code == 3 else AssertionError(code)
    return out


def _takes(probs: Tensor, k: Number) -> bool:
    """Whether the tensors lie in ordinary memory, and no tracer, mode or transform sees the calls made on them."""
    return probs.dtype in DTYPES and in_reach(probs) and probs.shape[-1] <= _MOST and (not isinstance(k, Tensor) or in_reach(k))


if LIBRARY:
    register("draw", _takes, draw)
