"""Sorting many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import readable

_MANY = 1 << 15  # from here on PyTorch sorts integers by radix


def sort_descending(values: Tensor, sorted_nearly: bool = False) -> tuple[Tensor, Tensor]:
    """Values and indices of every row from the largest to the smallest, equal values in their order; the values differentiable.

    Args:
        values: ``(..., n)``.
        sorted_nearly: they are almost in order already, which a sort by comparison likes.

    Example:
        >>> sort_descending(torch.tensor([1.0, 3.0, 2.0]))
        (tensor([3., 2., 1.]), tensor([1, 2, 0]))
    """
    native = kernels.pick("order", values)
    if native is None and (sorted_nearly or not _as_integers(values)):
        ordered = values.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    order = _radix_order(values.detach()) if native is None else native(values)
    return values.gather(-1, order), order


def _as_integers(values: Tensor) -> bool:
    return values.dtype == torch.float32 and values.numel() >= _MANY and readable(values)


def descending_order(values: Tensor) -> Tensor:
    """The indices that sort every row from the largest to the smallest, equal values in their order, nan first.

    Args:
        values: ``(..., n)``.

    Returns:
        ``(..., n)`` int64.

    Example:
        >>> descending_order(torch.tensor([1.0, 3.0, 2.0, 3.0]))
        tensor([1, 3, 2, 0])
    """
    values = values.detach()
    native = kernels.pick("order", values)
    if native is not None:
        return native(values)
    if not _as_integers(values):
        return values.sort(dim=-1, descending=True, stable=True).indices
    return _radix_order(values)


def _radix_order(values: Tensor) -> Tensor:
    """The order of float32 rows, by way of integers.

    On a CPU PyTorch sorts one long vector of integers by radix, many rows of floats by comparison. So float32 rows become integers
    of the same order, with the number of the row in front, and are sorted as one vector.
    """
    n = values.shape[-1]
    plain = (values + 0.0).masked_fill_(values.isnan(), torch.nan)  # one zero of the two, one nan of many
    bits = plain.reshape(-1, n).view(torch.int32)
    sign = bits >> 31
    row = torch.arange(bits.shape[0], dtype=torch.long, device=bits.device).unsqueeze(-1)
    key = bits.bitwise_xor_(sign.bitwise_and_(0x7FFFFFFF)).bitwise_not_().long().add_((row << 32) + (1 << 31))
    return key.flatten().sort(stable=True).indices.view(-1, n).sub_(row * n).view(values.shape)
