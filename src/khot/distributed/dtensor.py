"""The verbs on DTensors: ``khot.soft_topk(dtensor, k)`` and its like, with the placement of the scores for the result.

Mesh dimensions that shard other dimensions than the items, or replicate, work on their own parts with the plain verb. The one that
shards the items calls the verb of :mod:`khot.distributed` over its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from khot import hard, loss, sampling, select, soft
from khot._tensors import Number, files, is_dtensor
from khot.checks import check_per_row, check_scores
from khot.distributed import hard as sharded_hard
from khot.distributed import loss as sharded_loss
from khot.distributed import sampling as sharded_sampling
from khot.distributed import soft as sharded_soft
from khot.distributed._meet import digest
from khot.distributed._wire import Total


@dataclass(frozen=True)
class Placed:
    """How a DTensor lies on its mesh, seen along one of its dimensions.

    Attributes:
        mesh: the mesh of processes.
        placements: one for each dimension of the mesh.
        shape: the whole shape.
        items: the dimension to select along, counted from the front.
        over: the mesh dimension that shards the items, if one does.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    items: int
    over: int | None

    @staticmethod
    def of(tensor: Any, dim: int, name: str = "scores") -> Placed:
        """Read it off, or raise where the verbs cannot work on it."""
        check_scores(tensor.detach().to_local(), dim, name)
        items = dim % tensor.ndim
        if not all(_is_even(place) for place in tensor.placements):
            raise ValueError(
                f"{name} must be placed by Shard and Replicate, got {tensor.placements}; call {name}.redistribute(placements=...) first"
            )
        over = [i for i, place in enumerate(tensor.placements) if place.is_shard(items)]
        if len(over) > 1:
            raise ValueError(
                f"dim={dim} of {name} must be sharded over one dimension of the mesh, got {tensor.placements}; redistribute it first"
            )
        return Placed(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), items, over[0] if over else None)

    @property
    def group(self) -> Any:
        """The processes that share the items of a row."""
        return self.mesh.get_group(self.over)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The whole shape without the items."""
        return (*self.shape[: self.items], *self.shape[self.items + 1 :])

    @property
    def rows(self) -> tuple[Any, ...]:
        """The placements of what has one number for each row."""
        return tuple(_moved(place, self.items, -1) for place in self.placements)

    def choose(self, plain: Callable[..., Any], sharded: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call the plain verb on this process's rows, or the sharded one over the group."""
        return plain(*given, **named) if self.over is None else sharded(*given, **named, group=self.group)

    def local(self, tensor: Any) -> Tensor:
        """This process's part, items last."""
        return tensor.to_local().movedim(self.items, -1)

    def beside(self, value: Number, name: str) -> Number:
        """A per-row ``k`` or ``tau``, of which every process has the whole or which is a DTensor: this process's rows of it."""
        if not isinstance(value, Tensor):
            return value
        check_per_row(name, value, torch.empty(self.shape, dtype=torch.float32, device="meta"), self.items)
        wide = value.expand(self.row_shape)
        placed = wide if is_dtensor(wide) else self.everywhere(wide)
        return placed.redistribute(placements=self.rows).to_local()  # pyright: ignore[reportAttributeAccessIssue]

    def everywhere(self, value: Tensor) -> Any:
        """What every process has the same copy of, as a DTensor."""
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def seed(self, generator: Generator | None) -> Generator:
        """A generator that is the same where the rows are, and another where they are others; the mesh's first process draws it."""
        number = torch.randint(2**62, (1,), dtype=torch.long, device="cpu" if generator is None else generator.device, generator=generator)
        number = number.to(self.mesh.device_type)
        for i in range(self.mesh.ndim):
            dist.broadcast(number, group=self.mesh.get_group(i), group_src=0)
        place = self.mesh.get_coordinate()
        here = [place[i] for i, kind in enumerate(self.placements) if kind.is_shard() and i != self.over]
        return Generator(self.mesh.device_type).manual_seed(digest(int(number), *here))

    def whole(self, local: Tensor, shape: tuple[int, ...], placements: tuple[Any, ...]) -> Any:
        """The DTensor of this shape that the processes hold the parts of."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        return DTensor.from_local(local.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def mask(self, local: Tensor) -> Any:
        """A mask of local rows, items last, as a DTensor like the scores; with a number of samples in front where there is one."""
        number = local.ndim - len(self.shape)
        shape = (*local.shape[:number], *self.shape)
        placements = self.placements if not number else tuple(_moved(place, -1, number) for place in self.placements)
        return self.whole(local.movedim(-1, number + self.items), shape, placements)


def _is_even(place: Any) -> bool:
    """Whether the parts stand one behind the other in the order of the ranks, or are all the same. A strided shard is neither."""
    return place.is_replicate() or place.is_shard() and not hasattr(place, "split_factor")


def _moved(place: Any, items: int, by: int) -> Any:
    """The placement where dimensions behind ``items`` move by ``by``; that of the items themselves is left out."""
    from torch.distributed.tensor import Replicate, Shard

    if not place.is_shard() or place.is_shard(items):
        return Replicate()
    return Shard(place.dim + by) if place.dim > items else place


@files("soft_topk")
def soft_topk(scores: Any, k: Number, tau: Number, *, largest: bool, dim: int, **named: Any) -> Any:
    placed = Placed.of(scores, dim)
    x = _signed(placed.local(scores), largest)
    return placed.mask(placed.choose(soft.soft_topk, sharded_soft.soft_topk, x, placed.beside(k, "k"), placed.beside(tau, "tau"), **named))


@files("topk_mask")
def topk_mask(scores: Any, k: Number, *, largest: bool, dim: int) -> Any:
    placed = Placed.of(scores, dim)
    x = _signed(placed.local(scores.detach()), largest)
    return placed.mask(placed.choose(hard.topk_mask, sharded_hard.topk_mask, x, placed.beside(k, "k")))


@files("sample")
def sample(probs: Any, *, generator: Generator | None, dim: int, **named: Any) -> Any:
    placed = Placed.of(probs, dim, "probs")
    x = placed.local(probs.detach())
    return placed.mask(placed.choose(sampling.sample, sharded_sampling.sample, x, generator=placed.seed(generator), **named))


@files("sample_topk")
def sample_topk(scores: Any, k: Number, tau: Number, *, generator: Generator | None, largest: bool, dim: int, **named: Any) -> Any:
    placed = Placed.of(scores, dim)
    x = _signed(placed.local(scores), largest)
    rows = placed.beside(k, "k"), placed.beside(tau, "tau")
    return placed.mask(
        placed.choose(sampling.sample_topk, sharded_sampling.sample_topk, x, *rows, generator=placed.seed(generator), **named)
    )


@files("gather_topk")
def gather_topk(x: Any, mask: Any, k: int, *, dim: int) -> hard.Gathered:
    """Where the items are sharded, every process has all ``k`` after the gathering, and keeps its part of them."""
    placed = Placed.of(mask, -1, "mask")
    if not is_dtensor(x) or tuple(x.placements) != placed.placements or x.device_mesh != placed.mesh:
        came = x.placements if is_dtensor(x) else "a plain tensor"
        raise ValueError(f"x must be a DTensor with the placements of the mask, {placed.placements}, got {came}; redistribute it first")
    out = placed.choose(hard.gather_topk, sharded_hard.gather_topk, x.to_local(), mask.to_local(), k, dim=dim)
    items = dim % x.ndim
    shapes = (*x.shape[:items], k, *x.shape[items + 1 :]), (*mask.shape[:-1], k)
    return hard.Gathered(*(_kept(placed, part, shape) for part, shape in zip(out, shapes, strict=True)))


def _kept(placed: Placed, part: Tensor, shape: tuple[int, ...]) -> Any:
    return placed.whole(part, shape, placed.rows).redistribute(placements=placed.placements)


@files("select_topk")
def select_topk(x: Any, scores: Any, k: int, *given: Any) -> tuple[Any, Any]:
    """For items that are not sharded: the parts of a row that a process has not are needed for what it selects."""
    placed = Placed.of(scores, -1)
    if placed.over is not None:
        raise ValueError(
            "select_topk needs the items of a row in one process, got scores sharded along them; redistribute the scores, "
            "or take gather_topk(x, soft_topk(scores, k), k), which works on sharded items"
        )
    if not is_dtensor(x) or tuple(x.placements) != placed.placements:
        came = x.placements if is_dtensor(x) else "a plain tensor"
        raise ValueError(f"x must be a DTensor with the placements of the scores, {placed.placements}, got {came}; redistribute it first")
    values, index = select.select_rows(x.to_local(), scores.to_local(), k, *given)
    shape = (*scores.shape[:-1], k)
    return placed.whole(values, (*shape, x.shape[-1]), placed.placements), index if index is None else _kept(placed, index, shape)


@files("topk_loss")
def topk_loss(scores: Any, target: Any, tau: Number, *, dim: int, reduction: str, **named: Any) -> Any:
    loss.check_reduction(reduction)
    placed = Placed.of(scores, dim)
    x, goal, over = placed.local(scores), _goal(placed, target), placed.beside(tau, "tau")
    rows = placed.choose(loss.topk_loss, sharded_loss.topk_loss, x, goal, over, reduction="none", **named)
    if reduction == "none":
        return placed.whole(rows, placed.row_shape, placed.rows)
    total = rows.sum()
    for i, place in enumerate(placed.rows):
        if place.is_shard():
            total = Total.apply(total, placed.mesh.get_group(i))
    # A mean of means would be wrong for shards of different lengths.
    return placed.everywhere(total / math.prod(placed.row_shape) if reduction == "mean" else total)


def _goal(placed: Placed, target: Any) -> Tensor:
    """This process's part of a mask, of which every process has the whole or which is a DTensor."""
    if not isinstance(target, Tensor) or tuple(target.shape) != placed.shape:
        came = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be a mask of the scores' shape {placed.shape} where the scores are a DTensor, got {came}")
    whole: Any = target if is_dtensor(target) else placed.everywhere(target)
    return placed.local(whole.redistribute(placements=placed.placements))


def _signed(x: Tensor, largest: bool) -> Tensor:
    return x if largest else -x
