"""The k-hot cross entropy of sharded scores."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from khot._tensors import Number, work_dtype
from khot.checks import within_range
from khot.distributed._meet import meet
from khot.loss import as_mask, check_reduction, loss_of_rows, reduce_rows, threshold_family


def topk_loss(
    local_scores: Tensor,
    local_target: Tensor,
    tau: Number = 1.0,
    *,
    method: str = "sigmoid",
    group: Any = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    **options: Any,
) -> Tensor:
    r""":func:`khot.topk_loss` of rows that are sharded along the last dimension: the whole loss, the same on every rank.

    .. math:: L(x, y) = \Omega^*(x, k) - x^\top y - \tau \sum_i h(y_i), \quad k = \sum_{\text{ranks}} \sum_i y_i

    Call ``backward`` on every rank: each finds the gradient of its own scores, and the whole gradient of ``tau``.

    Args:
        local_scores: ``(..., n_local)``.
        local_target: like ``local_scores``: this rank's part of a mask in [0, 1].
        tau: temperature, the same on every rank.
        method: a threshold method.
        group: the process group; ``None`` for all processes.
        reduction: over the rows, ``mean``, ``sum`` or ``none``.
        options: the method's own.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> topk_loss(torch.tensor([9.0, -9.0, 9.0]), torch.tensor([1.0, 0.0, 1.0]))
        tensor(0.0003)
        >>> dist.destroy_process_group()
    """
    about = (method, options, reduction)
    wire = meet("topk_loss", local_scores, 0, tau, group=group, options=about, refuse=lambda: _check(local_scores, local_target))
    check_reduction(reduction)
    family = threshold_family(method, options)
    goal = as_mask(local_target, local_scores, -1)
    with torch.autocast(local_scores.device.type, enabled=False):
        x = local_scores.to(work_dtype(local_scores))
        k = wire.total(goal.sum(-1))
        loss = loss_of_rows(x, k, within_range(tau, x), goal=goal, family=family, rows=wire.rows)
    return reduce_rows(loss.to(local_scores.dtype), reduction)


def _check(scores: Tensor, target: Tensor) -> None:
    if not isinstance(target, Tensor) or target.shape != scores.shape:
        came = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"local_target must be a mask of the local scores' shape {tuple(scores.shape)}, got {came}")
    as_mask(target, scores, -1)
