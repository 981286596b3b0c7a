"""The plain verbs on DTensors beside the same calls on the whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import khot
from tests.distributed.table import METHODS, case, close, rand, refused


def meshes(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """A mesh and the placements to try on it; four processes make a square one."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        return [(square, (Shard(0), Shard(1))), (square, (Replicate(), Shard(1)))]
    line = init_device_mesh("cpu", (world,))
    return [(line, (place,)) for place in (Shard(1), Shard(0), Replicate())]


def both(mesh: Any, placements: tuple[Any, ...], call: Callable[..., Any], weight: Tensor, *inputs: Tensor) -> None:
    """Values, placement and gradients of ``call`` on distributed inputs and on the whole ones; inputs beyond the first stay plain."""
    from torch.distributed.tensor import distribute_tensor

    first = inputs[0].clone().requires_grad_()
    others = [value.clone().requires_grad_() for value in inputs[1:]]
    expected = call(first, *others)
    (expected * weight).sum().backward()
    placed = distribute_tensor(inputs[0].clone(), mesh, placements).requires_grad_()
    rest = [value.clone().requires_grad_() for value in inputs[1:]]
    found = call(placed, *rest)
    assert tuple(found.placements) == placements and found.shape == expected.shape
    (found * distribute_tensor(weight, mesh, placements)).sum().backward()
    close(found.detach().full_tensor(), expected.detach(), 8)
    assert tuple(placed.grad.placements) == placements, (placed.grad.placements, placements)
    close(placed.grad.full_tensor(), first.grad, 32)
    for mine, whole in zip(rest, others, strict=True):
        close(mine.grad, whole.grad, 64)


@case(2, 4, since=(2, 7))  # before, DTensor's own backward fails on a square mesh
def soft_masks_of_dtensors(rank: int, world: int) -> None:
    x, weight = rand(5, 11), rand(5, 11, seed=1)
    k, tau = torch.tensor([1.0, 2.5, 3.0, 4.0, 9.0]).double(), torch.tensor(0.7).double()
    for mesh, placements in meshes(world):
        for method in METHODS[::2] if world == 2 and placements[0].is_shard(1) else ("euclidean",):
            both(mesh, placements, lambda s, c, t, method=method: khot.soft_topk(s, c, t, method=method), weight, x, k, tau)
        if world == 4 and not placements[0].is_shard():
            continue  # enough for a mesh of that kind
        both(mesh, placements, lambda s: khot.soft_topk(s, 3, 0.5, hard=True, largest=False), weight, x)
        both(mesh, placements, lambda s: khot.soft_topk(s, 2, dim=0), weight, x)
        if not any(place.is_shard(1) for place in placements):
            both(mesh, placements, lambda s: khot.soft_topk(s, 2, method="softsort"), weight, x)


@case(2, 4)
def hard_masks_of_dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    x, items, weight = (rand(6, 10) * 2).round(), rand(6, 10, 3, seed=1), rand(6, 4, 3, seed=2)
    for mesh, placements in meshes(world):
        placed = distribute_tensor(x, mesh, placements)
        mask = khot.topk_mask(placed, 4)
        assert tuple(mask.placements) == placements and torch.equal(mask.full_tensor(), khot.topk_mask(x, 4))
        along = khot.topk_mask(placed, torch.arange(10) % 7, dim=0, largest=False)
        assert torch.equal(along.full_tensor(), khot.topk_mask(x, torch.arange(10) % 7, dim=0, largest=False))
        wholes = items.clone().requires_grad_(), x.clone().requires_grad_()
        expected = khot.gather_topk(wholes[0], wholes[1], 4)
        (expected.values * weight).sum().backward()
        leaves = [distribute_tensor(value, mesh, placements).requires_grad_() for value in (items, x)]
        found = khot.gather_topk(leaves[0], leaves[1], 4)
        assert tuple(found.values.placements) == tuple(found.indices.placements) == placements
        (found.values * distribute_tensor(weight, mesh, placements)).sum().backward()
        assert torch.equal(found.indices.full_tensor(), expected.indices)
        assert torch.equal(found.values.full_tensor(), expected.values)
        for mine, whole in zip(leaves, wholes, strict=True):
            close(mine.grad.full_tensor(), whole.grad, 8)
        _select(placed, leaves[0].detach(), x, items)


def _select(placed: Any, items: Any, whole: Tensor, whole_items: Tensor) -> None:
    if any(place.is_shard(1) for place in placed.placements):
        refused(ValueError, "needs the items of a row in one process", lambda: khot.select_topk(items, placed, 4))
        return
    found = khot.select_topk_with_indices(items, placed, 4, hard=True)
    expected = khot.select_topk_with_indices(whole_items, whole, 4, hard=True)
    assert torch.equal(found.values.full_tensor(), expected.values) and torch.equal(found.indices.full_tensor(), expected.indices)


@case(2, 4)
def samples_of_dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    x, number = rand(1, 9).repeat(4, 1), 400
    soft = khot.soft_topk(x, 3)
    for mesh, placements in meshes(world):
        placed = distribute_tensor(x, mesh, placements).requires_grad_()
        torch.manual_seed(rank)  # the processes need not agree on it
        z = khot.sample_topk(placed, 3, num_samples=number, design="pareto" if world == 2 else "systematic")
        assert z.shape == (number, 4, 9) and [p.is_shard() for p in z.placements] == [p.is_shard() for p in placements]
        full = z.detach().full_tensor()
        _same_everywhere(full)
        assert bool((full.sum(-1) == 3).all()) and (full.mean(0) - soft).abs().max() < 5 * 0.5 / number**0.5
        assert not torch.equal(full[:, 0], full[:, 2])  # the same scores in another process, or beside it: another draw
        again = khot.sample(khot.soft_topk(placed, 3).detach(), k=3)
        _same_everywhere(again.full_tensor())
        assert bool((again.full_tensor().sum(-1) == 3).all()) and tuple(again.placements) == placements


def _same_everywhere(values: Tensor) -> None:
    most = values.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(values, most), "processes that hold the same rows drew different masks"


@case(2, 4, since=(2, 7))  # before, DTensor's own backward fails on a square mesh
def losses_of_dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    x, goal = rand(5, 9), khot.topk_mask(rand(5, 9, seed=1), 3)
    for mesh, placements in meshes(world):
        for reduction in ("mean", "sum", "none"):
            whole, tau = x.clone().requires_grad_(), torch.tensor(0.6).double().requires_grad_()
            expected = khot.topk_loss(whole, goal, tau, reduction=reduction)
            expected.sum().backward()
            placed, over = distribute_tensor(x.clone(), mesh, placements).requires_grad_(), tau.detach().clone().requires_grad_()
            found = khot.topk_loss(
                placed, goal if reduction == "sum" else distribute_tensor(goal, mesh, placements), over, reduction=reduction
            )
            found.sum().backward()
            close(found.detach().full_tensor(), expected.detach(), 32)
            close(placed.grad.full_tensor(), whole.grad, 32)
            close(over.grad, tau.grad, 64)


@case(2)
def refusals_of_dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x = rand(4, 6)
    placed = distribute_tensor(x, mesh, [Shard(1)])
    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    refused(ValueError, "must be placed by Shard and Replicate", lambda: khot.soft_topk(partial, 2))
    refused(ValueError, "is no threshold family", lambda: khot.soft_topk(placed, 2, method="softsort"))
    refused(ValueError, "k must be between 0 and n=6", lambda: khot.soft_topk(placed, 7))
    refused(ValueError, "placements of the mask", lambda: khot.gather_topk(x, placed, 2, dim=-1))
    refused(ValueError, "mask of the scores' shape", lambda: khot.topk_loss(placed, torch.zeros(4, dtype=torch.long)))
    refused(TypeError, "to_local()", lambda: khot.soft_topk_matrix(placed, 2))
    refused(ValueError, "k must be a scalar or of shape (4,)", lambda: khot.soft_topk(placed, torch.ones(3)))
    assert_close(khot.soft_topk(placed, 2).full_tensor(), khot.soft_topk(x, 2))


@case(2, slow=True, since=(2, 7))
def compiled_dtensors(rank: int, world: int) -> None:
    """One graph, the collectives inside of its operators."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, x = init_device_mesh("cpu", (world,)), rand(4, 6)

    def work(scores: Any) -> Any:
        return khot.soft_topk(scores * 2, 2, 0.5, hard=True) * scores + khot.topk_mask(scores, 3)

    whole = x.clone().requires_grad_()
    expected = work(whole)
    expected.square().sum().backward()
    for place in (Shard(1), Shard(0)):
        placed = distribute_tensor(x.clone(), mesh, [place]).requires_grad_()
        found = torch.compile(work, fullgraph=True, backend="aot_eager")(placed)
        found.square().sum().backward()
        assert tuple(found.placements) == (place,)
        close(found.detach().full_tensor(), expected.detach(), 8)
        close(placed.grad.full_tensor(), whole.grad, 32)
