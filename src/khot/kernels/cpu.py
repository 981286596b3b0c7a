"""The native CPU kernel of the threshold family, called through ctypes, for tensors that hold their own memory."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, empty_like, get_num_threads  # a look into torch itself is slow

from khot._tensors import Number, in_reach
from khot.kernels import register
from khot.kernels.curve import Curve
from khot.kernels.library import LIBRARY, tell_once

FAMILIES = {"sigmoid": 0, "euclidean": 1, "laplace": 2, "gaussian": 3, "entmax15": 4, "entmax": 5}
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# What the entry points return, see kernel.h.
ERRORS = {
    1: "the family is unknown to the library; build it again: python -m khot.kernels.build",
    2: "the dtype is unknown to the library; build it again: python -m khot.kernels.build",
    3: "the number of rows or scores is negative or too large",
    4: "a tensor has no memory",
    5: "the sum of a row misses k by more than rounding explains; please report the scores, k and tau. "
    "Under khot.kernels.disabled() plain PyTorch computes the same",
}


def forward(
    x: Tensor,
    k: Number,
    tau: Number,
    family: str,
    *,
    shift: bool = True,
    curve: Callable[[], Curve] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The mask, and the threshold of every row as a float64 column if asked for.

    Args:
        x: ``(..., n)``.
        k: a number or a ``(..., 1)`` column.
        tau: a number or a ``(..., 1)`` column.
        family: a key of :data:`FAMILIES`.
        shift: whether to return the thresholds.
        curve: of a family that has one.
        out: contiguous memory for the mask, apart from that of ``x``.
    """
    if not x.is_contiguous():
        x = dense(x)
    y = empty_like(x) if out is None else out
    n = x.shape[-1]
    # The plain call spelled out: each call of a helper costs as much as a hundred scores.
    k_rows, k = (None, k) if type(k) is float else per_row(k, x)
    tau_rows, tau = (None, tau) if type(tau) is float else per_row(tau, x)
    table = None
    if curve is not None:
        scale, table, _ = curve()
        tau_rows, tau = None if tau_rows is None else tau_rows / scale, tau / scale
    t = x.new_empty((*x.shape[:-1], 1), dtype=torch.float64) if shift else None
    rows = (None, None, None) if k_rows is tau_rows is t is None else pointers(k_rows, tau_rows, t)
    code = LIBRARY.khot_threshold_forward(
        FAMILIES[family], DTYPES[x.dtype], x.data_ptr(), y.data_ptr(), rows[0], k, rows[1], tau, rows[2],
        x.numel() // n if n else math.prod(x.shape[:-1]), n, get_num_threads(), table,
    )  # fmt: skip
    if code:
        raise failure(code)
    return y, t


def backward(
    grad: Tensor,
    y: Tensor,
    tau: Number,
    family: str,
    x: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    grad_k: bool = False,
    curve: Callable[[], Curve] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients in the scores and, as float64 columns, in ``k`` if asked for and in ``tau`` if given ``x`` and ``shift``.

    The slope is computed from ``y``: for the gaussian by way of the inverse of its distribution function.
    ``out`` is contiguous memory for the gradient in the scores.
    """
    if grad.dtype is not y.dtype:
        grad = grad.to(y.dtype)
    if not (y.is_contiguous() and grad.is_contiguous()):
        y, grad = dense(y), dense(grad)
    gx = empty_like(y) if out is None else out
    n = y.shape[-1]
    gk = y.new_empty((*y.shape[:-1], 1), dtype=torch.float64) if grad_k else None
    gtau = y.new_empty((*y.shape[:-1], 1), dtype=torch.float64) if x is not None else None
    x = None if x is None else dense(x)
    tau_rows, tau = (None, tau) if type(tau) is float else per_row(tau, y)
    table = None
    if curve is not None:
        scale, table, _ = curve()
        tau_rows, tau = None if tau_rows is None else tau_rows / scale, tau / scale
    rest = (None, None) if x is shift is None else pointers(x, shift)
    more = (None, None, None) if gk is gtau is tau_rows is None else pointers(gk, gtau, tau_rows)
    code = LIBRARY.khot_threshold_backward(
        FAMILIES[family], DTYPES[y.dtype], y.data_ptr(), grad.data_ptr(), *rest, gx.data_ptr(), *more, tau,
        y.numel() // n if n else math.prod(y.shape[:-1]), n, get_num_threads(), table,
    )  # fmt: skip
    if code:
        raise failure(code)
    return gx, gk, gtau if gtau is None or curve is None else gtau / curve().scale


def failure(code: int) -> RuntimeError:
    return RuntimeError(f"the native kernel refuses or failed: {ERRORS.get(code, f'code {code}')}")


class Native(NamedTuple):
    """The two halves of an implementation of the threshold family."""

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def per_row(value: Number, x: Tensor) -> tuple[Tensor | None, float]:
    """A column as contiguous float64, one for each row; or a plain number."""
    if not isinstance(value, Tensor):
        return None, value
    return value.detach().double().expand(*x.shape[:-1], 1).contiguous(), 0.0


def pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _takes(family: str, x: Tensor, k: Number, tau: Number) -> bool:
    """Whether the tensors lie in ordinary memory, and no tracer, mode or transform sees the calls made on them."""
    return (
        family in FAMILIES
        and x.dtype in DTYPES
        and in_reach(x)
        and (type(k) is float or isinstance(k, Tensor) and in_reach(k))
        and (type(tau) is float or isinstance(tau, Tensor) and in_reach(tau))
    )


def _would_take(family: str, x: Tensor, k: Number, tau: Number) -> bool:
    """Without the library nothing is taken; the first time it would be, the user is told."""
    if _takes(family, x, k, tau):
        tell_once()
    return False


if LIBRARY:
    register("threshold", _takes, Native(forward, backward))
else:
    register("threshold", _would_take, None)
