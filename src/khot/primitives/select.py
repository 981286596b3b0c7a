"""Hard selection along the last dimension: the k-th largest, the k-hot mask, the indices of the k largest.

None of these has a gradient. In the mask -inf is never selected and a nan makes its own row nan; in the order of the indices nan stands
before everything. Among equal scores the earlier index wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number
from khot.kernels import ordinary
from khot.kernels.library import LIBRARY


def hard_mask(x: Tensor, k: Tensor | int) -> Tensor:
    """The 0/1 mask of the ``k`` largest, like ``x``.

    Args:
        x: ``(..., n)``.
        k: a whole number between 0 and n, or a ``(..., 1)`` column of them.

    Example:
        >>> hard_mask(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2)
        tensor([0., 1., 0., 1.])
    """
    x = x.detach() if x.requires_grad else x  # a batch of gradients cannot be detached, and need not be
    native = kernels.pick("mask", x, k)
    if native is not None:
        return native(x, k)
    cut = _kth(x, k)
    above, level = x > cut, x == cut
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= room))
    mask = (chosen & (x > -torch.inf)).to(x.dtype)
    return mask.masked_fill(x.isnan().any(-1, keepdim=True), torch.nan)


def ordinary_mask(scores: Tensor, k: Number) -> Tensor | None:
    """:func:`hard_mask` for the ordinary call with a whole number, or ``None`` for any other."""
    asked = ordinary.ask(scores, k, 1.0, 0) if LIBRARY and type(k) is int else None
    return None if asked is None else ordinary.mask(scores, asked)


def kth_largest(x: Tensor, k: Tensor | int) -> Tensor:
    """The ``k``-th largest of every row, ``(..., 1)``; +inf for ``k = 0``, nan for a row with a nan.

    Example:
        >>> kth_largest(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        tensor([2.])
    """
    x = x.detach()
    native = kernels.pick("kth", x, k)
    if native is not None:
        return native(x, k)
    return _kth(x, k).masked_fill(x.isnan().any(-1, keepdim=True), torch.nan)


def ends(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k``-th largest of every row and the one after it, each ``(..., 1)``, for ``0 < k < n``; nan for a row with a nan.

    Example:
        >>> ends(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2)
        (tensor([3.]), tensor([2.]))
    """
    x = x.detach()
    native = kernels.pick("ends", x, k)
    return (kth_largest(x, k), kth_largest(x, k + 1)) if native is None else native(x, k)


def largest(x: Tensor, k: int) -> Tensor:
    """The indices of the ``k`` largest of every row, ``(..., k)``, largest first and equal ones in their order.

    Example:
        >>> largest(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        tensor([1, 3, 2])
    """
    x = x.detach()
    native = kernels.pick("largest", x, k)
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k] if native is None else native(x, k)


def _kth(x: Tensor, k: Tensor | int) -> Tensor:
    top = torch.full((*x.shape[:-1], 1), torch.inf, dtype=x.dtype, device=x.device)
    if not isinstance(k, Tensor):
        return x.topk(k, sorted=True).values[..., -1:] if k > 0 else top
    ordered = x.sort(dim=-1, descending=True).values
    if ordered.shape[-1] == 0:
        return top
    return torch.where(k > 0, ordered.gather(-1, (k - 1).clamp(min=0).long()), top)
