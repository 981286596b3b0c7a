"""Native passes over weights and the soft mask of their magnitudes, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from khot._tensors import in_reach
from khot.kernels import register
from khot.kernels.cpu import DTYPES, ERRORS, FAMILIES, LIBRARY, dense

_SERVED = ("sigmoid", "euclidean", "laplace", "gaussian")  # the families whose slope these passes know
_MAGNITUDES, _PRODUCTS, _DERIVATIVE = range(3)
_TYPES = (torch.float32, torch.float64)
_library: Any = LIBRARY
_HAS = bool(LIBRARY) and hasattr(LIBRARY, "khot_masked")  # a library from before has it not

if _HAS:
    _whole, _pointer = ctypes.c_int, ctypes.c_void_p
    _library.khot_masked.argtypes = [*4 * [_whole], *6 * [_pointer], ctypes.c_double, _whole]


def magnitudes(weights: Sequence[Tensor], out: Tensor) -> tuple[float, float]:
    """The magnitudes of all weights into the flat ``out``; returns their sum and that of their squares."""
    sums = (ctypes.c_double * 2)()
    _run(_MAGNITUDES, "sigmoid", [dense(weight) for weight in weights], None, None, out, sums, 1.0)
    return sums[0], sums[1]


def products(weights: Sequence[Tensor], mask: Tensor, out: Sequence[Tensor]) -> None:
    """The weights times their parts of the flat ``mask`` into ``out``."""
    _run(_PRODUCTS, "sigmoid", [dense(weight) for weight in weights], None, out, mask, None, 1.0)


def gradients(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor], mask: Tensor, tau: float, family: str, out: Sequence[Tensor | None]
) -> None:
    """The gradients of the weights into ``out``, from those of the products with the flat ``mask``; ``None`` for 0, and for not wanted."""
    grads = [None if grad is None else dense(grad if grad.dtype is mask.dtype else grad.to(mask.dtype)) for grad in grads]
    _run(_DERIVATIVE, family, [dense(weight) for weight in weights], grads, out, mask, None, tau)


def _run(
    part: int,
    family: str,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor | None] | None,
    out: Sequence[Tensor | None] | None,
    flat: Tensor,
    sums: Any,
    tau: float,
) -> None:
    sizes = (ctypes.c_int64 * len(weights))(*(weight.numel() for weight in weights))
    w, g, to = (_pointers(tensors) for tensors in (weights, grads, out))
    code = _library.khot_masked(
        part, FAMILIES[family], DTYPES[flat.dtype], len(weights), sizes, w, g, to, flat.data_ptr(), sums, tau, get_num_threads()
    )
    if code:
        raise RuntimeError(f"the native pass refuses or failed: {ERRORS.get(code, f'code {code}')}")


def _pointers(tensors: Sequence[Tensor | None] | None) -> Any:
    if tensors is None:
        return None
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


class Masked(NamedTuple):
    """The passes."""

    magnitudes: Any
    products: Any
    gradients: Any


def _takes(family: str, weights: Sequence[Tensor]) -> bool:
    """Whether the weights lie in ordinary memory and are of one dtype."""
    one = weights[0].dtype
    return family in _SERVED and one in _TYPES and all(weight.dtype == one and in_reach(weight) for weight in weights)


if _HAS:
    register("masked", _takes, Masked(magnitudes, products, gradients))
