"""The native code of the ordinary call: what is not a tensor goes over packed in one argument, as ctypes takes its time for each."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from torch import Tensor, empty_like, get_num_threads

from khot import kernels
from khot._tensors import Number, in_reach
from khot.kernels.cpu import DTYPES, dense, failure
from khot.kernels.library import LIBRARY

_LOW, _HIGH = 1e-30, 1e30  # temperatures between these need no look at the dtype
_MOST = 2**31 - 2  # items in a row, which are counted in 32 bits
_ASK = struct.Struct("ddqqiii")  # as in ordinary.cpp
_pack = _ASK.pack
_library: Any = LIBRARY

if LIBRARY:
    _pointer, _packed = ctypes.c_void_p, ctypes.c_char_p
    _forward, _backward, _mask = _library.khot_ordinary_forward, _library.khot_ordinary_backward, _library.khot_ordinary_mask
    _forward.argtypes = _mask.argtypes = [_pointer, _pointer, _packed]
    _backward.argtypes = [_pointer, _pointer, _pointer, _packed]


def ask(scores: Tensor, k: Number, tau: Number, family: int) -> bytes | None:
    """The numbers of an ordinary call, packed; ``None`` for any other, which goes the general way.

    Ordinary are dense scores in the memory of this machine that nobody records or transforms, beside two numbers that need no
    message: ``k`` from 0 to n, and a ``tau`` that every dtype can divide by. Written out, as it is asked for every call.
    """
    if not in_reach(scores) or not kernels._enabled or type(k) is not int and type(k) is not float:
        return None
    shape, dtype = scores.shape, DTYPES.get(scores.dtype)
    if not shape or dtype is None or type(tau) is not float and type(tau) is not int:
        return None
    n = shape[-1]
    return _pack(k, tau, scores.numel(), n, family, dtype, get_num_threads()) if 0 <= k <= n <= _MOST and _LOW < tau < _HIGH else None


def tau_of(asked: bytes) -> float:
    return _ASK.unpack(asked)[1]


def forward(x: Tensor, asked: bytes) -> Tensor:
    """The mask of a threshold family."""
    if not x.is_contiguous():
        x = dense(x)
    y = empty_like(x)
    if code := _forward(x.data_ptr(), y.data_ptr(), asked):
        raise failure(code)
    return y


def backward(grad: Tensor, y: Tensor, asked: bytes) -> Tensor:
    """The gradient in the scores, from the mask that :func:`forward` made."""
    if not grad.is_contiguous():
        grad = dense(grad)
    out = empty_like(y)
    if code := _backward(y.data_ptr(), grad.data_ptr(), out.data_ptr(), asked):
        raise failure(code)
    return out


def mask(x: Tensor, asked: bytes) -> Tensor:
    """The hard mask, for a whole ``k``."""
    if not x.is_contiguous():
        x = dense(x)
    out = empty_like(x)
    if code := _mask(x.data_ptr(), out.data_ptr(), asked):
        raise MemoryError("no memory to select in; take fewer or shorter rows at once") if code == 3 else AssertionError(code)
    return out
