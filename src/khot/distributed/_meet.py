"""The door of the sharded verbs: the ranks compare what they were called with, so that all go on or all raise.

A rank that raised alone would leave the others waiting in a collective. So every call begins with one all-gather of a header of fixed
size, also from a rank whose own arguments are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from khot._tensors import Number, is_bare
from khot.checks import check, check_scores
from khot.distributed._wire import Wire
from khot.distributed.traffic import all_gather

_FIELDS = ("verb", "dtype", "shape without the last dimension", "k", "tau", "options", "requires_grad")
_EXTRA = 3  # numbers in front of the fields: whether the rank refuses, its length, its seed


def meet(
    verb: str,
    scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    group: Any,
    options: Any = (),
    generator: Generator | None = None,
    draws: bool = False,
    refuse: Callable[[], object] = lambda: None,
    others: tuple[Tensor, ...] = (),
) -> Wire:
    """Compare the arguments over the ranks and check them against the whole length; raises on every rank or on none.

    Args:
        verb: what was called.
        scores: ``(..., n_local)``.
        k: how many, of the whole row.
        tau: temperature.
        group: the process group, ``None`` for all.
        options: whatever else must be the same everywhere.
        generator: source of the common seed; that of the first rank counts.
        draws: whether the verb needs a seed at all.
        refuse: further checks of what is here only.
        others: tensors beside the scores that may require a gradient.
    """
    rank = _rank_in(group)
    error: Exception | None = None
    fields: tuple[Any, ...] = ()
    try:
        _check_local(scores)
        refuse()
        fields = _describe(verb, scores, k, tau, options, others)
    except (TypeError, ValueError) as caught:
        error = caught
    length = 0 if error else scores.shape[-1]
    headers = _exchange(error, length, _draw_seed(generator) if draws else 0, fields, group)
    _compare(headers, rank, error, fields)
    wire = Wire(group, rank, tuple(header[1] for header in headers), headers[0][2])
    # A view of one number stands for the whole row: the checks look at shape and dtype only.
    check(scores.detach().new_zeros(1).expand(*scores.shape[:-1], wire.length), k, tau)
    return wire


def _rank_in(group: Any) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("khot.distributed needs a process group; call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group; only its members may call the verb")
    return rank


def _check_local(scores: Tensor) -> None:
    check_scores(scores)
    if not is_bare(scores):
        raise TypeError(f"local_scores must be a plain tensor outside of transforms, got {type(scores).__name__}")


def _describe(verb: str, scores: Tensor, k: Number, tau: Number, options: Any, others: tuple[Tensor, ...]) -> tuple[Any, ...]:
    grads = tuple(isinstance(v, Tensor) and v.requires_grad for v in (scores, k, tau, *others)) if torch.is_grad_enabled() else ()
    return verb, str(scores.dtype), tuple(scores.shape[:-1]), k, tau, options, grads


def _draw_seed(generator: Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), dtype=torch.long, device=device, generator=generator))


def digest(*values: Any) -> int:
    """A number below 2**63 that differs where the values do."""
    code = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            code.update(repr((data.dtype, tuple(data.shape))).encode() + bytes(data.view(-1).view(torch.uint8).tolist()))
        else:
            code.update(repr(float(value) if isinstance(value, Real) else value).encode())
    return int.from_bytes(code.digest(), "little") >> 1


def _exchange(error: Exception | None, length: int, seed: int, fields: tuple[Any, ...], group: Any) -> list[list[int]]:
    """The headers of all ranks."""
    world = dist.get_world_size(group)
    if world == 1:  # agrees with itself, and a collective takes longer than a short row
        return [[error is not None, length, seed]]
    codes = [digest(value) for value in fields] or [0] * len(_FIELDS)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor([error is not None, length, seed, *codes], dtype=torch.long, device=device)
    parts = [torch.empty_like(mine) for _ in range(world)]
    all_gather(parts, mine, group)
    return torch.stack(parts).tolist()


def _compare(headers: list[list[int]], rank: int, error: Exception | None, fields: tuple[Any, ...]) -> None:
    if error is not None:
        raise error
    refused = [i for i, header in enumerate(headers) if header[0]]
    if refused:
        raise ValueError(f"rank {refused[0]} refused its arguments, so that no rank can go on; its own error says why")
    codes = [header[_EXTRA:] for header in headers]
    for i, (name, value) in enumerate(zip(_FIELDS, fields, strict=True) if len(headers) > 1 else ()):
        other = [j for j, code in enumerate(codes) if code[i] != codes[0][i]]
        if other:
            where = f"rank {other[0]} differs from rank 0" if len(other) == 1 else f"ranks {other} differ from rank 0"
            raise ValueError(f"{name} must be the same on every rank, {where}; rank {rank} has {value!r}")
