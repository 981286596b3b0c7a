"""The native row sort, isotonic regression, soft ranks and soft sorting, called through ctypes."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number, in_reach
from khot.kernels import register
from khot.kernels.cpu import LIBRARY, dense, per_row, pointers

DTYPES = {torch.float32: 0, torch.float64: 1}
MOST = 1 << 30  # items in a row, which are counted in 32 bits
_library: Any = LIBRARY

POINTER, REAL, WHOLE, INDEX = ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_int64


class Law(NamedTuple):
    """Which isotonic problem, and how its result is told.

    With ``centre`` positive, ranks are relative to that of the item at this place, and infinite scores stay infinite.
    """

    number: int  # 0 and 1: ranks by l2 and kl; 2 and 3: sorted values
    sign: float  # the scores are multiplied by it before
    factor: float  # and the result by this
    centre: int = 0
    wide: bool = False  # the result is float64


def order(values: Tensor) -> Tensor:
    """``(..., n)`` int64: the indices that sort every row from the largest to the smallest, equal values in their order, nan first."""
    values = dense(values)
    out = torch.empty(values.shape, dtype=torch.long, device=values.device)
    rows, n = num_rows(values), values.shape[-1]
    done(_library.khot_order(DTYPES[values.dtype], values.data_ptr(), out.data_ptr(), rows, n, torch.get_num_threads()))
    return out


def isotonic(y: Tensor, weights: Tensor | None, logs: bool) -> Tensor:
    """``(..., n)`` int64: the number of the block of each entry of float64 rows.

    Args:
        y: ``(..., n)``.
        weights: like ``y``; equal ones by default.
        logs: both are logarithms, of the parts of a ratio of sums; else the value of a block is a weighted mean.
    """
    y, weights = dense(y), None if weights is None else dense(weights.expand_as(y))
    ids = torch.empty(y.shape, dtype=torch.long, device=y.device)
    at = pointers(y, weights, ids)
    done(_library.khot_isotonic(logs, *at, num_rows(y), y.shape[-1], torch.get_num_threads()))
    return ids


def ranks(x: Tensor, tau: Number, law: Law) -> tuple[Tensor, Tensor]:
    """Soft ranks or sorted values of every row, and the order as int32, with ``~i`` in place of ``i`` where a block begins."""
    x = dense(x)
    out = torch.empty(x.shape, dtype=torch.float64 if law.wide else x.dtype, device=x.device)
    items = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    tau_rows, tau = per_row(tau, x)
    code = _library.khot_ranks_forward(
        DTYPES[x.dtype], law.number, law.wide, x.data_ptr(), *pointers(tau_rows), tau, law.sign, law.factor, law.centre,
        out.data_ptr(), items.data_ptr(), num_rows(x), x.shape[-1], torch.get_num_threads(),
    )  # fmt: skip
    done(code)
    return out, items


def ranks_backward(grad: Tensor, x: Tensor, items: Tensor, tau: Number, law: Law) -> tuple[Tensor, Tensor]:
    """The gradients in the scores and, as a float64 column, in tau."""
    x, grad = dense(x), dense(grad)
    out = torch.empty_like(x)
    grad_tau = torch.zeros((*x.shape[:-1], 1), dtype=torch.float64, device=x.device)
    tau_rows, tau = per_row(tau, x)
    code = _library.khot_ranks_backward(
        DTYPES[x.dtype], law.number, law.wide, x.data_ptr(), *pointers(tau_rows), tau, law.sign, law.factor, items.data_ptr(),
        grad.data_ptr(), out.data_ptr(), grad_tau.data_ptr(), num_rows(x), x.shape[-1], torch.get_num_threads(),
    )  # fmt: skip
    done(code)
    return out, grad_tau


class Pair(NamedTuple):
    """The two halves of an implementation."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def num_rows(values: Tensor) -> int:
    return values.numel() // values.shape[-1] if values.shape[-1] else 0


def done(code: int) -> None:
    """Raise if the library could not do what it was asked for."""
    if code == 3:
        raise MemoryError("no memory to sort the rows in; take fewer or shorter rows at once")
    assert not code, f"the native library refused a shape or a type: code {code}"


def takes(values: Tensor, *others: Number) -> bool:
    """Whether the tensors lie in ordinary memory and have one dtype, and no tracer, mode or transform sees the calls made on them."""
    return (
        values.dtype in DTYPES
        and in_reach(values)
        and values.shape[-1] <= MOST
        and all(not isinstance(other, Tensor) or in_reach(other) and other.dtype is values.dtype for other in others)
    )


def _takes_wide(y: Tensor, weights: Tensor | None, logs: bool) -> bool:
    return y.dtype is torch.float64 and (takes(y) if weights is None else takes(y, weights))


def _takes_ranks(x: Tensor, tau: Number, *others: Tensor) -> bool:
    """As :func:`takes`, but tau and gradients may be float64 beside float32 scores."""
    return takes(x) and all(not isinstance(other, Tensor) or in_reach(other) for other in (tau, *others))


if LIBRARY:
    _library.khot_order.argtypes = [WHOLE, POINTER, POINTER, INDEX, INDEX, WHOLE]
    _library.khot_isotonic.argtypes = [WHOLE, *3 * [POINTER], INDEX, INDEX, WHOLE]
    _library.khot_ranks_forward.argtypes = [
        *3 * [WHOLE], POINTER, POINTER, *3 * [REAL], INDEX, POINTER, POINTER, INDEX, INDEX, WHOLE
    ]  # fmt: skip
    _library.khot_ranks_backward.argtypes = [*3 * [WHOLE], POINTER, POINTER, *3 * [REAL], *4 * [POINTER], INDEX, INDEX, WHOLE]
    register("order", takes, order)
    register("isotonic", _takes_wide, isotonic)
    register("ranks", _takes_ranks, Pair(ranks, ranks_backward))
