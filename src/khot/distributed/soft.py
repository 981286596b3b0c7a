"""The soft mask of sharded scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from khot._tensors import Number
from khot.checks import within_range
from khot.distributed import compiled
from khot.distributed._meet import meet
from khot.distributed._wire import Wire
from khot.distributed.hard import shard_of_mask
from khot.hard import through
from khot.loss import threshold_family
from khot.primitives.threshold.autograd import solve_mask


def soft_topk(
    local_scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    method: str = "sigmoid",
    group: Any = None,
    hard: bool = False,
    **options: Any,
) -> Tensor:
    r"""This rank's shard of the soft top-k mask of rows that are sharded along the last dimension.

    .. math:: y_i = F((x_i - t)/\tau), \quad \sum_{\text{ranks}} \sum_i y_i = k

    All ranks search for the same ``t``: one all-gather of a header, then one all-reduce of a few numbers per row for every round, and one
    or two in the backward pass. The traffic does not depend on the length of the rows.

    Args:
        local_scores: ``(..., n_local)``, this rank's items; ``n_local`` may differ between ranks and may be 0.
        k: how many to select of the whole row, the same on every rank; a tensor of shape ``(...)`` receives the whole gradient.
        tau: temperature, the same on every rank; a tensor receives the whole gradient.
        method: a threshold method: sigmoid, euclidean, laplace, gaussian, entmax or permutahedron.
        group: the process group; ``None`` for all processes.
        hard: return the k-hot mask with the gradient of the soft one; a fractional ``k`` is rounded for the hard value.
        options: the method's own.

    Returns:
        Like ``local_scores``: the part of ``khot.soft_topk`` of the whole rows that belongs to this rank.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> soft_topk(torch.tensor([1.0, 4.0, 2.0, 3.0]), k=2, tau=0.5)
        tensor([0.0474, 0.9526, 0.2689, 0.7311])
        >>> dist.destroy_process_group()
    """
    if is_compiling():
        return compiled.soft_shard(local_scores, k, tau, method, group, hard, options)
    wire = meet("soft_topk", local_scores, k, tau, group=group, options=(method, options, hard))
    soft = solve_shard(wire, local_scores, k, tau, method, options)
    if not hard:
        return soft
    whole = k.detach().round() if isinstance(k, Tensor) else round(k)
    return through(shard_of_mask(wire, local_scores, whole), soft)


def solve_shard(wire: Wire, scores: Tensor, k: Number, tau: Number, method: str, options: dict[str, Any]) -> Tensor:
    """:func:`soft_topk` behind the door."""
    family = threshold_family(method, options)
    with torch.autocast(scores.device.type, enabled=False):
        return solve_mask(scores, k, within_range(tau, scores), family, wire.rows)
