"""What crosses the wire, and what happens where the ranks disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import khot
from tests.distributed.table import METHODS, case, close, counted, rand, refused, shard


@case(2, 3, 4)
def disagreements(rank: int, world: int) -> None:
    """All ranks raise, and the next call works."""
    verb, x, odd = khot.distributed, torch.zeros(2, 4), rank == world - 1
    same = "must be the same on every rank"
    refusals: list[tuple[str, Callable[[], Any]]] = [
        ("dtype " + same, lambda: verb.soft_topk(x.double() if odd else x, 2)),
        ("shape without the last dimension " + same, lambda: verb.soft_topk(x[:1] if odd else x, 2)),
        ("k " + same, lambda: verb.soft_topk(x, 3 if odd else 2)),
        ("k " + same, lambda: verb.soft_topk(x, torch.tensor([1.0, 2.0]) if odd else torch.tensor([1.0, 1.0]))),
        ("tau " + same, lambda: verb.soft_topk(x, 2, 0.5 if odd else 1.0)),
        ("options " + same, lambda: verb.soft_topk(x, 2, method="laplace" if odd else "sigmoid")),
        ("requires_grad " + same, lambda: verb.soft_topk(x.clone().requires_grad_(odd), 2)),
        ("verb " + same, lambda: verb.topk_mask(x, 2) if odd else verb.soft_topk(x, 2)),
        ("must be of a floating dtype" if odd else "refused its arguments", lambda: verb.soft_topk(x.long() if odd else x, 2)),
        ("must be a torch.Tensor" if odd else "refused its arguments", lambda: verb.soft_topk([1.0] if odd else x, 2)),
        ("must lie in [0, 1]" if odd else "refused its arguments", lambda: verb.sample(x + 2 if odd else x)),
        ("must have shape" if odd else "refused its arguments", lambda: verb.gather_topk(x, x[:1] if odd else x, 2, dim=-1)),
        (f"k must be between 0 and n={4 * world}", lambda: verb.soft_topk(x, 4 * world + 1)),
        ("unknown method", lambda: verb.soft_topk(x, 2, method="sgmoid")),
        ("is no threshold family", lambda: verb.soft_topk(x, 2, method="softsort")),
        ("tau must be positive", lambda: verb.soft_topk(x, 2, 0.0)),
        ("needs the whole row", lambda: verb.sample(x, design="pivotal")),
        ("whole number", lambda: verb.topk_mask(x, 1.5)),
    ]
    for words, call in refusals:
        refused((ValueError, TypeError), words, call)
    close(verb.soft_topk(x, 2), torch.full_like(x, 2 / (4 * world)))


@case(2, 4)
def traffic(rank: int, world: int) -> None:
    """Eight all-reduces at most on normal scores, two in backward, a few numbers per row each, whatever the length."""
    for dtype in (torch.float32, torch.float64):
        for method in METHODS:
            for n in (1600, 16000):
                x = shard(rand(4, n, dtype=dtype), rank, world, "even").requires_grad_()
                k, tau = torch.full((4,), n / 20).requires_grad_(), torch.tensor(1.0).requires_grad_()
                with counted() as seen:
                    y = khot.distributed.soft_topk(x, k, tau, method=method)
                assert seen["all_gather"] == 1 and 1 <= seen["all_reduce"] <= 8, (method, dtype, n, seen)
                assert seen["bytes"] <= 10 * 8 + 8 * 2 * 4 * 8, seen  # the header, and two sums per row and round
                with counted() as seen:
                    y.sum().backward()
                assert 1 <= seen["all_reduce"] <= 2 and not seen["all_gather"] and seen["bytes"] <= 3 * 4 * 8, (method, seen)


@case(4)
def traffic_of_short_rows(rank: int, world: int) -> None:
    """A header and the rows, by one all-gather each."""
    x = shard(rand(3, 100, dtype=torch.float32), rank, world, "even")
    for method in METHODS:
        with counted() as seen:
            found = khot.distributed.soft_topk(x, 3, 0.01, method=method)
        assert seen == {"all_reduce": 0, "all_gather": 2, "bytes": 10 * 8 + 3 * 25 * 4}, seen
        close(found, shard(khot.soft_topk(rand(3, 100, dtype=torch.float32), 3, 0.01, method=method), rank, world, "even"))


@case(2, 3, 4)
def traffic_of_the_hard_verbs(rank: int, world: int) -> None:
    sent = []
    for n in (300, 30000):
        x = shard(rand(4, n, dtype=torch.float32), rank, world, "even")
        sent.append([])
        for call in (lambda: khot.distributed.topk_mask(x, 9), lambda: khot.distributed.gather_topk(x, x, 9, dim=-1)):
            with counted() as seen:
                call()
            sent[-1].append(dict(seen))
    assert sent[0] == sent[1], sent
