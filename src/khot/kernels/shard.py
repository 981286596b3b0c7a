"""Native passes over rows whose other parts lie in other processes, called through ctypes; the threshold is given."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from khot._tensors import Number, in_reach
from khot.kernels import register
from khot.kernels.cpu import DTYPES, ERRORS, LIBRARY, dense, per_row, pointers

FAMILIES = {"sigmoid": 0, "euclidean": 1, "laplace": 2, "gaussian": 3}
_MOMENTS, _MEASURE, _MASK, _WEIGH, _GRADIENT = range(5)
_TYPES = (torch.float32, torch.float64)
_library: Any = LIBRARY
_HAS = bool(LIBRARY) and hasattr(LIBRARY, "khot_shard")  # a library from before has it not

if _HAS:
    _whole, _index, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    _library.khot_shard.argtypes = [*3 * [_whole], *6 * [_pointer], ctypes.c_double, _pointer, *2 * [_index], _whole]


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of ``x`` and of its square, roughly, as float64 columns."""
    return _run(_MOMENTS, "sigmoid", x, tau=1.0)


def measure(x: Tensor, t: Tensor, s: Tensor | None, tau: Number, family: str) -> tuple[Tensor, Tensor]:
    """The sums of ``F(u)`` and ``F'(u)`` at ``u = (x - t) / tau + s``, as float64 columns."""
    return _run(_MEASURE, family, x, at=t, low=s, tau=tau)


def mask(x: Tensor, t: Tensor, s: Tensor, tau: Number, family: str) -> tuple[Tensor, Tensor]:
    """``F(u)``, and its sum as a float64 column."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, _run(_MASK, family, x, out=out, at=t, low=s, tau=tau)[0]


def weigh(grad: Tensor, y: Tensor, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of ``v grad`` and of the slopes ``v``, and what :func:`gradient` goes on with."""
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    return *_run(_WEIGH, family, y, grad=grad, out=out, tau=1.0), out


def gradient(grad: Tensor, y: Tensor, mean: Tensor, tau: Number, family: str, out: Tensor) -> Tensor:
    """``v (grad - mean) / tau``, in what :func:`weigh` returned."""
    _run(_GRADIENT, family, y, grad=grad, out=out, at=mean, tau=tau)
    return out


def _run(
    part: int,
    family: str,
    x: Tensor,
    *,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    at: Tensor | None = None,
    low: Tensor | None = None,
    tau: Number,
) -> tuple[Tensor, Tensor]:
    x, n = dense(x), x.shape[-1]
    grad = None if grad is None else dense(grad.to(x.dtype))
    rows, tau = per_row(tau, x)
    column = torch.zeros((*x.shape[:-1], 1), dtype=torch.float64, device="cpu")
    place = None if at is None else per_row(at, x)[0]
    more = column if low is None else per_row(low, x)[0]
    sums = torch.empty((*x.shape[:-1], 2), dtype=torch.float64, device="cpu")
    given = pointers(x, grad, out, place, more, rows)
    code = _library.khot_shard(part, FAMILIES[family], DTYPES[x.dtype], *given, tau, sums.data_ptr(), column.numel(), n, get_num_threads())
    if code:
        raise RuntimeError(f"the native kernel refuses or failed: {ERRORS.get(code, f'code {code}')}")
    return sums[..., :1], sums[..., 1:]


class Passes(NamedTuple):
    """The passes that a search over processes is made of."""

    moments: Any = moments
    measure: Any = measure
    mask: Any = mask
    weigh: Any = weigh
    gradient: Any = gradient


def _takes(family: str, x: Tensor, *values: Number) -> bool:
    """Whether the tensors lie in ordinary memory, and no tracer, mode or transform sees the calls made on them."""
    return (
        family in FAMILIES and x.dtype in _TYPES and in_reach(x) and all(in_reach(value) for value in values if isinstance(value, Tensor))
    )


if _HAS:
    register("shard", _takes, Passes())
