"""Hard masks, gathered items and samples of sharded rows beside those of the whole rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing import assert_close

import khot
from tests.distributed.table import bounds, case, close, rand, shard


@case(2, 3, 4)
def masks_with_ties(rank: int, world: int) -> None:
    full = (rand(6, 37, dtype=torch.float32) * 2).round()
    full[0] = 0.0
    full[1, :30] = -torch.inf
    full[2, 36] = torch.nan
    full[3, 5] = torch.inf
    for k in (0, 1, 10, 37, torch.tensor([0, 3, 5, 37, 1, 36])):
        for x in (full, full.double()):
            assert_close(
                khot.distributed.topk_mask(shard(x, rank, world), k),
                shard(khot.topk_mask(x, k), rank, world),
                rtol=0,
                atol=0,
                equal_nan=True,
            )


@case(2, 3, 4)
def gathered_items(rank: int, world: int) -> None:
    mask, items, weight = (rand(2, 29) * 2).round(), rand(2, 29, 3, seed=1), rand(2, 9, 3, seed=2)
    mask[1, 4:] = -torch.inf
    at = bounds(29, rank, world, "uneven")
    parts = []
    for call, m, x in ((khot.gather_topk, mask, items), (khot.distributed.gather_topk, mask[:, at], items[:, at])):
        m, x = m.clone().requires_grad_(), x.clone().requires_grad_()
        out = call(x, m, 9)
        (out.values * weight).sum().backward()
        parts.append((out.values.detach(), out.indices, m.grad, x.grad))
    whole, mine = parts
    assert torch.equal(mine[0], whole[0]) and torch.equal(mine[1], whole[1])
    close(mine[2], whole[2][:, at])
    close(mine[3], whole[3][:, at])


@case(2, 3, 4)
def samples(rank: int, world: int) -> None:
    full = khot.soft_topk(rand(2, 19), 6, 0.5)
    full[:, 3], full[:, 15] = 1.0, 0.0
    full = khot.soft_topk(torch.logit(full.clamp(1e-6, 1 - 1e-6)), 6)
    number = 3000
    designs: tuple[tuple[str, dict[str, Any]], ...] = (("systematic", {}), ("systematic", {"order": "fixed"}), ("pareto", {"k": 6}))
    for design, options in designs:
        generator = torch.Generator().manual_seed(5 + rank)  # ranks need not agree on it
        z = khot.distributed.sample(shard(full, rank, world), design=design, num_samples=number, generator=generator, **options)
        assert bool(((z == 0) | (z == 1)).all())
        counts = z.sum(-1)
        dist.all_reduce(counts)
        assert bool((counts == 6).all())
        error = (z.mean(0) - shard(full, rank, world)).abs()
        assert not error.numel() or error.max() < 5 * 0.5 / number**0.5
    again = [khot.distributed.sample(shard(full, rank, world), generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*again)


@case(2, 3, 4)
def soft_samples(rank: int, world: int) -> None:
    full, weight, number = rand(2, 19), rand(2, 19, seed=1), 2000
    for k, design in ((6, "systematic"), (4.25, "systematic"), (4.25, "pareto")):
        x = shard(full, rank, world).requires_grad_()
        z = khot.distributed.sample_topk(x, k, 0.5, num_samples=number, design=design, generator=torch.Generator().manual_seed(3))
        (z.mean(0) * shard(weight, rank, world)).sum().backward()
        counts = z.detach().sum(-1)
        dist.all_reduce(counts)
        assert bool(((counts == int(k)) | (counts == -int(-k // 1))).all()) and abs(counts.mean() - k) < 0.06
        whole = full.clone().requires_grad_()
        soft = khot.soft_topk(whole, k, 0.5)
        (soft * weight).sum().backward()
        close(x.grad, shard(whole.grad, rank, world), 64)
        error = (z.detach().mean(0) - shard(soft.detach(), rank, world)).abs()
        assert not error.numel() or error.max() < 5 * 0.5 / number**0.5
    full[0, 18] = torch.nan
    z = khot.distributed.sample_topk(shard(full, rank, world), 4)
    assert bool(z[0].isnan().all()) and not bool(z[1].isnan().any())
