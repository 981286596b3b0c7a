"""The hard top-k of sharded scores: this rank's shard of the mask, and the chosen items on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from khot._tensors import Number, group_named, wide_dtype, work_dtype
from khot.checks import check_k
from khot.distributed._meet import meet
from khot.distributed._wire import Wire, name_of
from khot.hard import Gathered, check_items, check_whole_values, through
from khot.primitives.select import hard_mask, largest
from khot.primitives.threshold.rows import count_kth


def topk_mask(local_scores: Tensor, k: Number, *, group: Any = None) -> Tensor:
    """This rank's shard of the k-hot mask of sharded rows, without gradient; among equal scores the earlier index wins.

    The cut is found by counting, a few bits at a time, with one all-reduce each: 8 of 15 numbers per row in float32, 16 in float64.

    Args:
        local_scores: ``(..., n_local)``; -inf is never selected, a nan makes its own row nan on every rank.
        k: a whole number, or a tensor of whole numbers ``(...)``, the same on every rank.
        group: the process group; ``None`` for all processes.

    Returns:
        0/1 mask like ``local_scores``.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> topk_mask(torch.tensor([1.0, 3.0, 2.0, 3.0]), k=2)
        tensor([0., 1., 0., 1.])
        >>> dist.destroy_process_group()
    """
    if is_compiling():
        return mask_shard(local_scores, k, group)
    wire = meet("topk_mask", local_scores, k, group=group)
    check_whole_values(k)
    return shard_of_mask(wire, local_scores, k)


def shard_of_mask(wire: Wire, scores: Tensor, k: Number) -> Tensor:
    """:func:`topk_mask` behind the door."""
    x = scores.detach()
    if wire.alone:
        column = k.detach().to(x.device).expand(x.shape[:-1]).unsqueeze(-1) if isinstance(k, Tensor) else int(k)
        return hard_mask(x, column)
    x = x.to(work_dtype(x))  # exact, and the order stays
    count = torch.as_tensor(k, dtype=wide_dtype(x), device=x.device).detach().expand(x.shape[:-1]).unsqueeze(-1)
    cut = count_kth(x, count.clamp(min=1), wire.rows.sums).masked_fill(count == 0, torch.inf)
    above, level = x > cut, x == cut
    counts = torch.stack([part.sum(-1, keepdim=True) for part in (above, level, x.isnan())])
    num_above, num_level, num_nan = wire.gather(counts).unbind(1)  # (ranks, ..., 1) each
    room = count - num_above.sum(0) - num_level[: wire.rank].sum(0)  # equal scores on earlier ranks come first
    chosen = (above | level & (level.cumsum(-1) <= room)) & (x > -torch.inf)
    return chosen.to(scores.dtype).masked_fill(num_nan.sum(0) > 0, torch.nan)


def mask_shard(scores: Tensor, k: Number, group: Any) -> Tensor:
    """:func:`khot.distributed.topk_mask` in a graph."""
    rows, number = (k.detach(), 0.0) if isinstance(k, Tensor) else (None, float(k))
    return _mask(scores.detach(), rows, number, name_of(group))


@torch.library.custom_op("khot::sharded_mask", mutates_args=())
def _mask(x: Tensor, k: Tensor | None, number: float, places: str) -> Tensor:
    return topk_mask(x, number if k is None else k, group=group_named(places)).contiguous()


@_mask.register_fake
def _(x: Tensor, k: Tensor | None, number: float, places: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gather_topk(local_x: Tensor, local_mask: Tensor, k: int, *, dim: int = -2, group: Any = None) -> Gathered:
    """The ``k`` items with the largest mask of all ranks, on every rank, largest first, equal ones in the order of their global index.

    Every rank sends its own ``k`` best mask entries and the chosen items it has: ``O(k)`` numbers, however many items there are.

    Args:
        local_x: items along ``dim``, e.g. ``(..., n_local, d)``.
        local_mask: ``local_x.shape`` up to and including ``dim``, e.g. ``(..., n_local)``.
        k: how many to keep of all, the same on every rank.
        dim: the dimension of the items in ``local_x``.
        group: the process group; ``None`` for all processes.

    Returns:
        ``values``: the chosen items; ``indices``: their places in the whole row. Both are the same on every rank. Items and mask get
        gradients as in :func:`khot.gather_topk`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> gather_topk(torch.arange(8.0).reshape(4, 2), torch.tensor([0.1, 0.9, 0.0, 1.0]), k=2).indices
        tensor([3, 1])
        >>> dist.destroy_process_group()
    """
    about = (dim, str(local_x.dtype), tuple(local_x.shape[dim + 1 :]) if dim != -1 else ()) if isinstance(local_x, Tensor) else ()
    others = (local_x,) if isinstance(local_x, Tensor) else ()
    wire = meet(
        "gather_topk", local_mask, k, group=group, options=about, refuse=lambda: check_items(local_x, local_mask, dim), others=others
    )
    check_k(k, local_mask.detach().new_zeros(1).expand(*local_mask.shape[:-1], wire.length), fractional=False)
    indices = _best(wire, local_mask.detach(), int(k))
    kept = _taken(wire, local_mask, indices, -1)
    values = _taken(wire, local_x, indices, dim % local_x.ndim)
    if local_mask.requires_grad:
        trailing = local_x.ndim - kept.ndim
        values = values * through(torch.ones_like(kept), kept).to(values.dtype).reshape(*kept.shape, *[1] * trailing)
    return Gathered(values, indices)


def _best(wire: Wire, x: Tensor, k: int) -> Tensor:
    """The global indices of the ``k`` largest, ``(..., k)``."""
    place = largest(x, min(k, x.shape[-1]))
    short = k - place.shape[-1]
    # In float64 all dtypes keep their order; a padded place is told by its index.
    value = torch.nn.functional.pad(x.gather(-1, place).to(wide_dtype(x)), (0, short), value=-torch.inf)
    index = torch.nn.functional.pad(place + wire.offset, (0, short), value=-1)
    if wire.alone:
        return index
    values, indices = (torch.cat(wire.gather(part).unbind(0), -1) for part in (value, index))
    # Ranks stand in the order of their items and each is sorted, so that a stable sort keeps equal ones in the order of the index.
    order = values.sort(dim=-1, descending=True, stable=True).indices
    indices = indices.gather(-1, order)
    real = (indices < 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :k]
    return indices.gather(-1, real)


def _taken(wire: Wire, x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """The items at global ``indices`` along ``dim``, from whichever rank has them."""
    items = dim % x.ndim
    shape = (*indices.shape, *x.shape[items + 1 :])
    local = indices - wire.offset
    here = (local >= 0) & (local < x.shape[items])
    wide = [1] * (x.ndim - items - 1)
    if x.shape[items] == 0:
        return wire.total(x.new_zeros(shape) + x.sum())
    at = local.clamp(0, x.shape[items] - 1).reshape(*indices.shape, *wide).expand(shape)
    return wire.total(torch.where(here.reshape(*indices.shape, *wide), x.gather(items, at), 0.0))
