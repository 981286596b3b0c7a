"""Native selection: hard masks, the k-th largest and the indices of the k largest, called through ctypes."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, empty_like, get_num_threads

from khot._tensors import in_reach
from khot.kernels import register
from khot.kernels.cpu import DTYPES, LIBRARY, dense

_MOST = 2**31 - 2  # items in a row, which are counted in 32 bits
_library: Any = LIBRARY

if LIBRARY:
    _pointer, _index = ctypes.c_void_p, ctypes.c_int64
    _library.khot_select.argtypes = [ctypes.c_int, *2 * [_pointer], _index, *4 * [_pointer], *2 * [_index], ctypes.c_int]


def mask(x: Tensor, k: Tensor | int) -> Tensor:
    """The 0/1 mask of the ``k`` largest of every row, ``k`` a number or a ``(..., 1)`` column of whole numbers."""
    x = dense(x)
    out = empty_like(x)
    _select(x, k, mask=out)
    return out


def kth(x: Tensor, k: Tensor | int) -> Tensor:
    """The ``k``-th largest of every row, ``(..., 1)``."""
    x = dense(x)
    out = torch.full((*x.shape[:-1], 1), torch.inf, dtype=x.dtype, device=x.device)
    _select(x, k, kth=out)
    return out


def ends(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k``-th largest of every row and the one after it, each ``(..., 1)``, for ``0 < k < n``."""
    x = dense(x)
    kth, after = x.new_empty((*x.shape[:-1], 1)), x.new_empty((*x.shape[:-1], 1))
    _select(x, k, kth=kth, after=after)
    return kth, after


def largest(x: Tensor, k: int) -> Tensor:
    """The indices of the ``k`` largest of every row, ``(..., k)`` int64, largest first, equal ones in their order, nan before all."""
    x = dense(x)
    out = torch.empty((*x.shape[:-1], k), dtype=torch.int64, device=x.device)
    _select(x, k, index=out)
    return out


def _select(
    x: Tensor,
    k: Tensor | int,
    mask: Tensor | None = None,
    kth: Tensor | None = None,
    index: Tensor | None = None,
    after: Tensor | None = None,
) -> None:
    n = x.shape[-1]
    rows = None if isinstance(k, int) else k.detach().to(torch.int64).expand(*x.shape[:-1], 1).contiguous()
    at = [None if tensor is None else tensor.data_ptr() for tensor in (rows, mask, kth, after, index)]
    code = _library.khot_select(
        DTYPES[x.dtype], x.data_ptr(), at[0], k if rows is None else 0, *at[1:], x.numel() // n if n else math.prod(x.shape[:-1]), n,
        get_num_threads(),
    )  # fmt: skip
    if code:
        raise MemoryError("no memory to select in; take fewer or shorter rows at once") if code == 3 else AssertionError(code)


def _takes(x: Tensor, k: Tensor | int) -> bool:
    """Whether the tensors lie in ordinary memory, and no tracer, mode or transform sees the calls made on them."""
    whole = type(k) is int or isinstance(k, Tensor) and in_reach(k)
    return whole and x.dtype in DTYPES and in_reach(x) and x.shape[-1] <= _MOST


if LIBRARY:
    register("mask", _takes, mask)
    register("kth", _takes, kth)
    register("ends", _takes, ends)
    register("largest", _takes, largest)
