"""What the sharded verbs of this process hand to collectives: how often, how much, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Counted while :func:`traffic` is open.

    Attributes:
        calls: collectives by their name.
        bytes: what this process handed to them.
        seconds: inside of them, the waiting for slower processes included; on devices that work asynchronously, only the calls.
    """

    calls: dict[str, int]
    bytes: int = 0
    seconds: float = 0.0


_open: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what the verbs of :mod:`khot.distributed` send inside the block.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with traffic() as seen:
        ...     _ = khot.distributed.soft_topk(torch.tensor([1.0, 4.0, 2.0, 3.0]), k=2)
        >>> seen.bytes  # a process that is alone has nobody to tell
        0
        >>> dist.destroy_process_group()
    """
    seen = Traffic({})
    _open.append(seen)
    try:
        yield seen
    finally:
        _open.remove(seen)


def counted(name: str, sent: Tensor, call: Callable[[], object]) -> None:
    """Run the collective ``call``, which sends ``sent``."""
    if not _open:
        call()
        return
    began = time.perf_counter()
    call()
    took = time.perf_counter() - began
    for seen in _open:
        seen.calls[name] = seen.calls.get(name, 0) + 1
        seen.bytes += sent.numel() * sent.element_size()
        seen.seconds += took


def all_reduce(values: Tensor, group: object) -> None:
    """The sum over the ranks, in place."""
    counted("all_reduce", values, lambda: dist.all_reduce(values, group=group))  # pyright: ignore[reportArgumentType]


def all_gather(parts: list[Tensor], part: Tensor, group: object) -> None:
    """The tensors of all ranks, which have one shape, into ``parts``."""
    counted("all_gather", part, lambda: dist.all_gather(parts, part, group=group))  # pyright: ignore[reportArgumentType]
