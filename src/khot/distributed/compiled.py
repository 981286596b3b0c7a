"""The soft mask of sharded rows as an operator: what compilers see. It names the process group, and the collectives run inside of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from khot._tensors import Number, group_named
from khot.checks import within_range
from khot.distributed._meet import meet
from khot.distributed._wire import Wire, name_of
from khot.distributed.hard import mask_shard
from khot.hard import through
from khot.loss import threshold_family
from khot.primitives.threshold.autograd import solve_spread
from khot.primitives.threshold.rows import Rows, resolves


def soft_shard(scores: Tensor, k: Number, tau: Number, method: str, group: Any, hard: bool, options: dict[str, Any]) -> Tensor:
    """:func:`khot.distributed.soft_topk` in a graph. The ranks compare their arguments when the graph runs."""
    family, places = threshold_family(method, options), name_of(group)
    soft = solve_spread(scores, k, within_range(tau, scores), family, places)
    if not hard:
        return soft
    return through(mask_shard(scores, k.detach().round() if isinstance(k, Tensor) else round(k), group), soft)


@resolves
def _rows_over(places: str, x: Tensor | None = None, k: Number = 0.0, tau: Number = 1.0) -> Rows:
    """The rows that a group shares. A gradient has nothing to compare: the ranks did that on the way forward."""
    group = group_named(places)
    if x is None:
        return Wire(group, dist.get_rank(group), (0,) * dist.get_world_size(group), 0).rows
    k, tau = (value.squeeze(-1) if isinstance(value, Tensor) else value for value in (k, tau))
    return meet("soft_topk", x, k, tau, group=group).rows
