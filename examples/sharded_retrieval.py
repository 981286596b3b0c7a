"""Learn which k of 10,000,000 items to keep, with the items spread over processes.

    python examples/sharded_retrieval.py [--quick] [--items 10000000] [--processes 2 4] [--steps 30]

Every item has a value that nobody knows. In every step each item shows its value with noise, twice as wide as the values themselves. A
budget of 1 % is learned by gradient: the soft mask of the scores says what is kept, and the objective is the mean value of what it keeps.
Every process has its own items, scores and optimiser. All that the processes tell each other are a few sums per step, however many items
there are: the bytes are counted and printed, with the split of the time into computing and communicating.

Needs: pip install khot
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

import khot.distributed

NOISE = 2.0
SHARE = 0.01


class Result(NamedTuple):
    """What one number of processes gives: seconds and bytes are per step and process."""

    processes: int
    learned: float  # the share of the best k items that were kept
    glimpse: float  # the same after one look at the noisy values
    computing: float
    communicating: float
    bytes: float
    collectives: float


class Items:
    """This process's part of the items."""

    def __init__(self, total: int, rank: int, world: int) -> None:
        start, end = total * rank // world, total * (rank + 1) // world
        # The values do not depend on the number of processes: each block of items has a seed of its own.
        self.values = _blocks(start, end)
        self.noise = torch.Generator().manual_seed(1000 + rank)

    def look(self) -> Tensor:
        return self.values + NOISE * torch.randn(len(self.values), generator=self.noise)


def _blocks(start: int, end: int, size: int = 10_000) -> Tensor:
    blocks = range(start // size, -(-end // size))
    values = torch.cat([torch.randn(size, generator=torch.Generator().manual_seed(block)) for block in blocks])
    return values[start - blocks.start * size :][: end - start].clone()


def learn(items: Items, k: int, steps: int) -> tuple[Tensor, float, khot.distributed.Traffic]:
    """Scores for this process's items, the seconds that the steps took, and what was sent."""
    scores = torch.zeros_like(items.values, requires_grad=True)
    optimizer = torch.optim.Adam([scores], lr=0.1)
    took = 0.0
    with khot.distributed.traffic() as seen:
        for _ in range(steps):
            values = items.look()  # not counted: the world does it
            began = time.perf_counter()
            mask = khot.distributed.soft_topk(scores, k, tau=0.5)
            loss = -(mask * values).sum() / k  # this process's part of a sum over all items
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            took += time.perf_counter() - began
    return scores.detach(), took, seen


def found(scores: Tensor, best: Tensor, k: int) -> float:
    """The share of the best k items among the k largest scores."""
    hits = (khot.distributed.topk_mask(scores, k) * best).sum()
    dist.all_reduce(hits)
    return float(hits) / k


def work(rank: int, world: int, folder: str, total: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    items, k = Items(total, rank, world), round(total * SHARE)
    best = khot.distributed.topk_mask(items.values, k)
    glimpse = found(items.look(), best, k)
    scores, took, seen = learn(items, k, steps)
    slowest = torch.tensor([took - seen.seconds, seen.seconds, seen.bytes, sum(seen.calls.values())], dtype=torch.float64) / steps
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    result = Result(world, found(scores, best, k), glimpse, *slowest.tolist())
    if rank == 0:
        torch.save(tuple(result), f"{folder}/result")
    dist.destroy_process_group()


def run(world: int, total: int, steps: int) -> Result:
    """Start the processes on this machine and wait for them; a process that fails ends the others."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, args=(world, folder, total, steps), nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
        return Result(*torch.load(f"{folder}/result"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200,000 items, 2 processes, 15 steps")
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    total, worlds, steps = (200_000, [2], 15) if options.quick else (options.items, options.processes, options.steps)
    print(f"{total:,} items, of which {round(total * SHARE):,} are kept; {steps} steps; chance finds {SHARE:.0%} of the best")
    print("processes  found after one look  learned  computing/step  communicating/step  collectives/step  bytes/step")
    for world in worlds:
        r = run(world, total, steps)
        print(f"{r.processes:9d}  {r.glimpse:20.1%}  {r.learned:7.1%}  {r.computing:12.3f} s  {r.communicating:16.3f} s", end="")
        print(f"  {r.collectives:16.1f}  {r.bytes:10.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
