"""The table of cases that every rank of a set of processes runs, and what they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

METHODS = ("sigmoid", "euclidean", "laplace", "gaussian", "entmax", "permutahedron")
Run = Callable[[int, int], None]


class Case(NamedTuple):
    run: Run
    worlds: tuple[int, ...]
    slow: bool


CASES: dict[str, Case] = {}


def case(*worlds: int, slow: bool = False, since: tuple[int, int] = (2, 6)) -> Callable[[Run], Run]:
    """File a function of ``(rank, world)`` for these numbers of processes; a slow one runs where it is asked for by name.

    ``since`` is the torch release from which on torch itself can do what the case needs.
    """

    def file(run: Run) -> Run:
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= since:
            CASES[run.__name__] = Case(run, worlds, slow)
        return run

    return file


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


def refused(kind: type[Exception] | tuple[type[Exception], ...], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no error that says {words!r}")


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
