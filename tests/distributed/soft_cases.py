"""The soft mask and the loss of sharded rows beside those of the whole rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing import assert_close

import khot
from tests.distributed.table import METHODS, case, close, rand, refused, shard, some


@case(2, 3, 4)
def values_and_gradients(rank: int, world: int) -> None:
    for dtype in (torch.float32,) if world == 3 else (torch.float64,):
        for i, method in enumerate(some(*METHODS, world=world)):
            kind = "even" if i % 2 else "uneven"
            full = rand(5, 83, seed=i, dtype=dtype)
            weight = rand(5, 83, seed=100 + i, dtype=dtype)
            k, tau = torch.tensor([1.0, 7.0, 3.25, 40.0, 82.0]), torch.tensor([1.0, 0.3, 2.0, 0.7, 1.0])
            parts = []
            for call, x, w in (
                (khot.soft_topk, full, weight),
                (khot.distributed.soft_topk, shard(full, rank, world, kind), shard(weight, rank, world, kind)),
            ):
                inputs = [v.clone().to(dtype).requires_grad_() for v in (x, k, tau)]
                y = call(*inputs, method=method)
                (y * w).sum().backward()
                parts.append((y.detach(), *(v.grad for v in inputs)))
            whole, mine = parts
            for found, expected in zip(mine[:2], whole[:2], strict=True):
                close(found, shard(expected, rank, world, kind), 4)
            for found, expected in zip(mine[2:], whole[2:], strict=True):
                close(found, expected, 16)


@case(2, 3, 4)
def second_derivatives(rank: int, world: int) -> None:
    full, weight = rand(2, 13), rand(2, 13, seed=1)
    for method in some("sigmoid", "gaussian", world=world):
        parts = []
        for call, x, w in (
            (khot.soft_topk, full, weight),
            (khot.distributed.soft_topk, shard(full, rank, world), shard(weight, rank, world)),
        ):
            inputs = [
                x.clone().requires_grad_(),
                torch.tensor([3.0, 2.5]).double().requires_grad_(),
                torch.tensor(0.7).double().requires_grad_(),
            ]
            first = torch.autograd.grad((call(*inputs, method=method) * w).sum(), inputs, create_graph=True)
            # A sum over the items has a part on every rank; what is the same on every rank counts once.
            parts.append([torch.autograd.grad((g * g).sum(), inputs, retain_graph=True) for g in first])
        for whole, mine in zip(*parts, strict=True):
            close(mine[0], shard(whole[0], rank, world), 100)
            close(mine[1], whole[1], 100)
            close(mine[2], whole[2], 100)


@case(2, 3, 4)
def shapes(rank: int, world: int) -> None:
    for shape, k in (((7,), 2), ((2, 3, 11), 4.5), ((0, 6), 2), ((2, 0), 0), ((1, 1), 1), ((3, 9), 0), ((3, 9), 9), ((1, 4000), 100)):
        for method in some("sigmoid", "euclidean", world=world):
            full = rand(*shape, dtype=torch.float32)
            close(
                khot.distributed.soft_topk(shard(full, rank, world), k, 0.5, method=method),
                shard(khot.soft_topk(full, k, 0.5, method=method), rank, world),
                4,
            )
            hard = khot.distributed.soft_topk(shard(full, rank, world), k, method=method, hard=True)
            assert torch.equal(hard, shard(khot.soft_topk(full, k, method=method, hard=True), rank, world))


@case(2, 3, 4)
def hostile_scores(rank: int, world: int) -> None:
    full = rand(12, 24, dtype=torch.float32)
    full[0, :6] += 1e6  # all mass on the first ranks
    full[1, 12:] = -torch.inf
    full[2] = -torch.inf
    full[3, 20] = torch.inf
    full[4, 2:18] = torch.inf
    full[5, 23] = torch.nan
    full[6] = 1.0
    full[7, ::2] = 2.0
    full[8] *= 1e30
    full[9] *= 1e-30
    full[10] = torch.arange(24.0) // 5
    full[11, 0], full[11, 23] = torch.inf, -torch.inf
    kind = "even" if world == 3 else "uneven"
    for method in some(*METHODS, world=world):
        for k in (3, 24) if world == 2 else (5.5,):
            x, whole = shard(full, rank, world, kind).requires_grad_(), full.clone().requires_grad_()
            expected = khot.soft_topk(whole, k, 0.5, method=method)
            found = khot.distributed.soft_topk(x, k, 0.5, method=method)
            close(found.detach(), shard(expected.detach(), rank, world, kind), 16)
            (found * shard(full, rank, world, kind).nan_to_num(0, 1, 0).clamp(-1, 1)).sum().backward()
            (expected * full.nan_to_num(0, 1, 0).clamp(-1, 1)).sum().backward()
            close(x.grad, shard(whole.grad, rank, world, kind), 64)


@case(2, 3, 4)
def half_precision(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        full = rand(3, 50, dtype=dtype)
        found = khot.distributed.soft_topk(shard(full, rank, world), 5, 0.5)
        assert found.dtype == dtype
        assert_close(found, shard(khot.soft_topk(full, 5, 0.5), rank, world))
        assert torch.equal(khot.distributed.topk_mask(shard(full, rank, world), 5), shard(khot.topk_mask(full, 5), rank, world))


@case(2, 3, 4)
def losses(rank: int, world: int) -> None:
    full, target = rand(3, 21), khot.topk_mask(rand(3, 21, seed=1), 4)
    for method in some(*METHODS, world=world):
        for reduction in ("mean", "sum", "none"):
            parts = []
            for call, x, goal in (
                (khot.topk_loss, full, target),
                (khot.distributed.topk_loss, shard(full, rank, world), shard(target, rank, world)),
            ):
                x, tau = x.clone().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
                loss = call(x, goal, tau, method=method, reduction=reduction)
                loss.sum().backward()
                parts.append((loss.detach(), tau.grad, x.grad))
            close(parts[1][0], parts[0][0], 64)
            close(parts[1][1], parts[0][1], 64)
            close(parts[1][2], shard(parts[0][2], rank, world), 64)


@case(2, 3, 4)
def groups(rank: int, world: int) -> None:
    """Two of the processes share rows; the others are not asked, and are refused."""
    group = dist.new_group([0, 1])
    full = rand(3, 11)
    if rank < 2:
        found = khot.distributed.soft_topk(shard(full, rank, 2), 3, group=group, hard=True)
        assert torch.equal(found, shard(khot.topk_mask(full, 3), rank, 2))
    else:
        refused(ValueError, "not in the group", lambda: khot.distributed.soft_topk(full, 3, group=group))
    dist.barrier()
