"""Random k-hot masks of sharded probabilities and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from khot._tensors import Number, readable
from khot.checks import check_options
from khot.designs._common import random_order
from khot.designs.pareto import pareto_keys
from khot.distributed._meet import digest, meet
from khot.distributed._wire import Wire
from khot.distributed.hard import shard_of_mask
from khot.distributed.soft import solve_shard
from khot.hard import straight_through
from khot.primitives.draw import check_order
from khot.primitives.fixed_point import absorbed, units_of
from khot.registry import find_design
from khot.sampling import check_range, check_sum, wanted_size


def sample(
    local_probs: Tensor,
    *,
    design: str = "systematic",
    generator: Generator | None = None,
    group: Any = None,
    num_samples: int | None = None,
    k: int | None = None,
    **options: Any,
) -> Tensor:
    r"""This rank's shard of a random k-hot mask with prescribed inclusion probabilities.

    Args:
        local_probs: ``(..., n_local)`` in [0, 1]; the whole rows sum to whole numbers k.
        design: ``"systematic"`` (exact probabilities; ``order="random"`` shuffles inside every shard, ``"fixed"`` nowhere) or
            ``"pareto"``.
        generator: source of random numbers. That of the first rank counts, and the other ranks derive their own from it.
        group: the process group; ``None`` for all processes.
        num_samples: how many independent masks; they are stacked in front.
        k: the sum of the whole rows, where it shall be checked, or where half precision leaves it in doubt.
        options: the design's own.

    Returns:
        0/1 mask like ``local_probs``, without gradient; over all ranks every row has exactly k ones.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sample(torch.tensor([0.2, 0.7, 0.8, 0.3, 1.0, 0.0])).sum()
        tensor(3.)
        >>> dist.destroy_process_group()
    """
    about = (design, options, num_samples, k)
    wire = meet(
        "sample", local_probs, 0, group=group, options=about, generator=generator, draws=True, refuse=lambda: check_range(local_probs)
    )
    draw = _find(design, options)
    x = _work(local_probs)
    (total,) = wire.rows.sums(x)
    size = total.round() if k is None else torch.full_like(total, k)
    if readable(total):
        check_sum(total, size, torch.finfo(local_probs.dtype).eps, wire.length, k)
    return _draw(draw, wire, x, size, num_samples, options).to(local_probs.dtype)


def sample_topk(
    local_scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    method: str = "sigmoid",
    design: str = "systematic",
    generator: Generator | None = None,
    group: Any = None,
    num_samples: int | None = None,
    design_options: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    r"""This rank's shard of a random k-hot mask whose expectation and gradient are those of the sharded soft top-k.

    Args:
        local_scores: ``(..., n_local)``; -inf is never drawn, +inf always.
        k: how many to draw of the whole row; a fraction draws the whole number below or above, with ``k`` as the mean.
        tau: temperature.
        method: a threshold method.
        design: ``"systematic"`` or ``"pareto"``.
        generator: source of random numbers; that of the first rank counts.
        group: the process group; ``None`` for all processes.
        num_samples: how many independent masks; they are stacked in front.
        design_options: the design's own options, e.g. ``{"order": "fixed"}``.
        options: the method's own.

    Returns:
        0/1 mask like ``local_scores``, with the gradient of :func:`khot.distributed.soft_topk`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sample_topk(torch.tensor([1.0, 4.0, 2.0, 3.0]), k=2, tau=0.5).sum()
        tensor(2.)
        >>> dist.destroy_process_group()
    """
    about = (method, options, design, design_options, num_samples)
    wire = meet("sample_topk", local_scores, k, tau, group=group, options=about, generator=generator, draws=True)
    draw = _find(design, design_options or {})
    soft = solve_shard(wire, local_scores, k, tau, method, options)
    x = _work(soft)
    lost = wire.rows.sums(x.isnan())[0] > 0
    x = x.masked_fill(lost, 0.0)
    wanted = wanted_size(wire.rows.sums(x)[0], k)
    hard = _draw_filled(draw, wire, x, wanted, num_samples, design_options or {}).masked_fill(lost, torch.nan)
    return straight_through(hard.to(soft.dtype), soft)


def _draw_filled(
    draw: Callable[..., Tensor], wire: Wire, x: Tensor, wanted: Tensor, num_samples: int | None, options: dict[str, Any]
) -> Tensor:
    """Draw rows that sum to ``wanted``; a fraction is filled up by a phantom item behind the last shard, which is dropped again."""
    size = wanted.ceil()
    last = wire.rank == len(wire.lengths) - 1
    filled = torch.cat((x, (size - wanted).to(x.dtype)), -1) if last else x
    whole = Wire(wire.group, wire.rank, (*wire.lengths[:-1], wire.lengths[-1] + 1), wire.seed)
    return _draw(draw, whole, filled, size, num_samples, options)[..., : x.shape[-1]]


def _draw(draw: Callable[..., Tensor], wire: Wire, probs: Tensor, size: Tensor, num_samples: int | None, options: dict[str, Any]) -> Tensor:
    if num_samples is not None and num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, got {num_samples}")
    shape = probs.shape if num_samples is None else (num_samples, *probs.shape)
    if 0 in shape[:-1] or not wire.length:
        return probs.new_zeros(shape)
    return draw(wire, probs.expand(shape), size.expand(*shape[:-1], 1), **options)


def _systematic(wire: Wire, probs: Tensor, k: Tensor, *, order: str = "random") -> Tensor:
    """:func:`khot.designs.systematic` with the cumulative sums of all ranks: one comb passes over all shards."""
    check_order(order)
    if order == "fixed" or not probs.shape[-1]:
        return _teeth(wire, probs, k)
    place = random_order(probs, _generator(probs, wire.seed, wire.rank))
    return torch.zeros_like(probs).scatter_(-1, place, _teeth(wire, probs.gather(-1, place), k))


def _teeth(wire: Wire, probs: Tensor, k: Tensor) -> Tensor:
    bits = min(52, 62 - wire.length.bit_length())
    units, _ = units_of(probs, k, bits, wire.rows)
    counts = torch.stack([part.sum(-1, keepdim=True) for part in (units, units > 0, units == 1 << bits)])
    gathered = wire.gather(counts)  # (ranks, 3, ..., 1)
    lack = (k.long() << bits) - gathered[:, 0].sum(0)
    cumulative = absorbed(units, lack, bits, gathered[: wire.rank].sum(0).unbind(0))
    common = _generator(probs, wire.seed)
    start = torch.randint(1 << bits, k.shape, dtype=torch.long, device=probs.device, generator=common)
    return ((cumulative + start) >> bits).diff().to(probs.dtype)


def _pareto(wire: Wire, probs: Tensor, k: Tensor, *, adjusted: bool = True) -> Tensor:
    """:func:`khot.designs.pareto`: every rank makes its own keys, and the k largest of all are found by a common cut."""
    keys = pareto_keys(probs, _generator(probs, wire.seed, wire.rank), adjusted, wire.rows)
    return shard_of_mask(wire, keys, k.squeeze(-1))


_DESIGNS: dict[str, Callable[..., Tensor]] = {"systematic": _systematic, "pareto": _pareto}


def _find(design: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    row = find_design(design)
    if design not in _DESIGNS:
        raise ValueError(f"design {design!r} needs the whole row in one process; sharded rows have {' and '.join(sorted(_DESIGNS))}")
    check_options(design, options, row.options, "design")
    return _DESIGNS[design]


def _generator(like: Tensor, *parts: int) -> Generator:
    return Generator(like.device).manual_seed(digest(*parts))


def _work(probs: Tensor) -> Tensor:
    return probs.detach().to(torch.promote_types(probs.dtype, torch.float32))
