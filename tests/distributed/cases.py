"""What every rank of a set of processes runs: the sharded call beside the plain one on the whole rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import khot

METHODS = ("sigmoid", "euclidean", "laplace", "gaussian", "entmax", "permutahedron")
CASES: dict[str, Callable[[int, int], None]] = {}


def case(run: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[run.__name__] = run
    return run


def some(*names: str, world: int) -> tuple[str, ...]:
    """All of them for two processes; three and four share them, as they take longer."""
    return names if world == 2 else names[world - 3 :: 2]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(seed)).to(dtype)


def bounds(n: int, rank: int, world: int, kind: str) -> slice:
    """Where the shard of a rank lies: equal parts, or parts that grow with an empty one in between."""
    sizes = [n // world + (i < n % world) for i in range(world)]
    if kind == "uneven":
        sizes = [max(n // (2 * world), 1) if n else 0 for _ in range(world)]
        sizes[world // 2] = 0
        sizes[-1 if world > 2 else 0] += n - sum(sizes)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def shard(x: Tensor, rank: int, world: int, kind: str = "uneven") -> Tensor:
    return x[..., bounds(x.shape[-1], rank, world, kind)].clone()


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """To rounding: the sums are taken in another order."""
    eps = torch.finfo(expected.dtype).eps
    assert_close(found, expected, rtol=64 * eps, atol=64 * eps * scale, equal_nan=True)


@case
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


@case
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


@case
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


@case
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


@case
def half_precision(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        full = rand(3, 50, dtype=dtype)
        found = khot.distributed.soft_topk(shard(full, rank, world), 5, 0.5)
        assert found.dtype == dtype
        assert_close(found, shard(khot.soft_topk(full, 5, 0.5), rank, world))
        assert torch.equal(khot.distributed.topk_mask(shard(full, rank, world), 5), shard(khot.topk_mask(full, 5), rank, world))


@case
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


@case
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


@case
def samples(rank: int, world: int) -> None:
    full = khot.soft_topk(rand(2, 19), 6, 0.5)
    full[:, 3], full[:, 15] = 1.0, 0.0
    full = khot.soft_topk(torch.logit(full.clamp(1e-6, 1 - 1e-6)), 6)
    number = 3000
    for design, options in (("systematic", {}), ("systematic", {"order": "fixed"}), ("pareto", {})):
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


@case
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


@case
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


def _refused(kind: type[Exception] | tuple[type[Exception], ...], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no error that says {words!r}")


@case
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
        _refused((ValueError, TypeError), words, call)
    close(verb.soft_topk(x, 2), torch.full_like(x, 2 / (4 * world)))


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often the collectives are called, and how many bytes this rank hands to them."""
    seen = {"all_reduce": 0, "all_gather": 0, "bytes": 0}
    plain = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            sent = args[0] if name == "all_reduce" else args[1]
            seen["bytes"] += sent.numel() * sent.element_size()
            return plain[name](*args, **kwargs)

        return call

    try:
        for name in plain:
            setattr(dist, name, counting(name))
        yield seen
    finally:
        for name, call in plain.items():
            setattr(dist, name, call)


@case
def traffic(rank: int, world: int) -> None:
    """Eight all-reduces at most on normal scores, a few numbers per row each, whatever the length.

    In float64, rows of the families with corners sometimes go to the search with a bracket, which takes more of them.
    """
    for dtype, methods in ((torch.float32, METHODS), (torch.float64, ("sigmoid", "gaussian"))):
        for method in methods:
            for n in (400, 8000):
                x = shard(rand(4, n, dtype=dtype), rank, world, "even").requires_grad_()
                k, tau = torch.full((4,), n / 20).requires_grad_(), torch.tensor(1.0).requires_grad_()
                with counted() as seen:
                    y = khot.distributed.soft_topk(x, k, tau, method=method)
                assert seen["all_gather"] == 1 and seen["all_reduce"] <= 8, (method, dtype, n, seen)
                assert seen["bytes"] <= 10 * 8 + 8 * 2 * 4 * 8, seen  # the header, and two sums per row and round
                with counted() as seen:
                    y.sum().backward()
                assert seen["all_reduce"] <= 2 and not seen["all_gather"] and seen["bytes"] <= 3 * 4 * 8, (method, seen)


@case
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


@case
def groups(rank: int, world: int) -> None:
    """Two of the processes share rows; the others are not asked, and are refused."""
    group = dist.new_group([0, 1])
    full = rand(3, 11)
    if rank < 2:
        found = khot.distributed.soft_topk(shard(full, rank, 2), 3, group=group, hard=True)
        assert torch.equal(found, shard(khot.topk_mask(full, 3), rank, 2))
    else:
        _refused(ValueError, "not in the group", lambda: khot.distributed.soft_topk(full, 3, group=group))
    dist.barrier()
