"""The threshold family as fused row kernels for GPUs, where Triton is there: one program per row, no waiting for the host."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from khot._tensors import Number, is_bare, is_traced
from khot.kernels import register
from khot.kernels.cpu import FAMILIES, Native

_CURVELESS = ("sigmoid", "euclidean", "laplace", "gaussian")  # entmax runs on the reference
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float64 runs on the reference
BLOCK = 2048  # scores in flight at a time; a choice, not measured


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def forward(x: Tensor, k: Number, tau: Number, family: str, *, shift: bool = True, curve: None = None) -> tuple[Tensor, Tensor | None]:
    """Like :func:`khot.kernels.cpu.forward`."""
    x = x.detach().contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    t = x.new_empty((*x.shape[:-1], 1), dtype=torch.float64)
    if x.numel():
        _rows().forward[(x.numel() // n,)](
            x, y, *_per_row(k, x), *_per_row(tau, x), t, n, FAMILY=FAMILIES[family], BLOCK=_block(n)
        )  # fmt: skip
    return y, t if shift else None


def backward(
    grad: Tensor,
    y: Tensor,
    tau: Number,
    family: str,
    x: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    grad_k: bool = False,
    curve: None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Like :func:`khot.kernels.cpu.backward`."""
    y, grad = y.detach().contiguous(), grad.detach().to(y.dtype).contiguous()
    gx, n = torch.empty_like(y), y.shape[-1]
    gk, gtau = (y.new_zeros((*y.shape[:-1], 1), dtype=torch.float64) for _ in range(2))
    scores = y if x is None else x.detach().contiguous()
    near = gk if shift is None else shift
    if y.numel():
        _rows().backward[(y.numel() // n,)](
            y, grad, scores, near, gx, gk, gtau, *_per_row(tau, y), n,
            LEARNS_TAU=x is not None, FAMILY=FAMILIES[family], BLOCK=_block(n),
        )  # fmt: skip
    return gx, gk if grad_k else None, gtau if x is not None else None


def mask(x: Tensor, k: Tensor | int) -> Tensor:
    """Like :func:`khot.kernels.select.mask`."""
    x = x.detach().contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    if x.numel():
        _hard().hard[(x.numel() // n,)](x, out, *_whole(k, x), n, BLOCK=_block(n))
    return out


def forward_and_mask(x: Tensor, k: float, tau: float, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """The hard mask, the soft one and the thresholds as a float64 column, in one launch; the hard mask rounds a fractional ``k``."""
    x = x.detach().contiguous()
    hard, y, n = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    t = x.new_empty((*x.shape[:-1], 1), dtype=torch.float64)
    if x.numel():
        _hard().both[(x.numel() // n,)](
            x, y, hard, *_per_row(k, x), _whole(round(k), x)[0], *_per_row(tau, x), t, n, FAMILY=FAMILIES[family], BLOCK=_block(n)
        )  # fmt: skip
    return hard, y, t


def _whole(k: Tensor | int, x: Tensor) -> tuple[Tensor, int]:
    """:func:`_per_row` for whole numbers."""
    values, stride = _per_row(k, x)
    return values.to(torch.int64), stride


def _hard() -> Any:
    from khot.kernels import triton_hard

    return triton_hard


def _rows() -> Any:
    from khot.kernels import triton_rows

    return triton_rows


def _block(n: int) -> int:
    return min(BLOCK, max(16, 1 << (n - 1).bit_length()))


def _per_row(value: Number, x: Tensor) -> tuple[Tensor, int]:
    """The values and the distance from one row's to the next: 0 where all rows share one."""
    if isinstance(value, Tensor) and value.numel() > 1:
        return value.detach().double().expand(*x.shape[:-1], 1).contiguous(), 1
    if isinstance(value, Tensor):
        return value.detach().double().reshape(1), 0
    return torch.full((1,), value, dtype=torch.float64, device=x.device), 0


def _takes(family: str, x: Tensor, k: Number, tau: Number) -> bool:
    return family in _CURVELESS and _takes_scores(x)


def _takes_scores(x: Tensor, k: Tensor | int = 0) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling() and is_bare(x) and x.dtype in DTYPES and not is_traced() and installed()


register("threshold", _takes, Native(forward, backward))
register("mask", _takes_scores, mask)
register("threshold and mask", _takes, forward_and_mask)
