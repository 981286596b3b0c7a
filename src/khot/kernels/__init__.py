"""Optional native code: for each primitive, pairs of (condition, implementation), tried in order.

A primitive asks :func:`pick` for an implementation that takes its arguments; ``None`` means that it runs its reference in plain
PyTorch. ``KHOT_KERNELS=0`` in the environment, or ``with khot.kernels.disabled():``, keeps everything on the reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from khot.kernels.library import BUILD, REASON, instruction_set

_pairs: dict[str, list[tuple[Callable[..., bool], Any]]] = {}
_enabled = os.environ.get("KHOT_KERNELS", "1") != "0"


def register(primitive: str, condition: Callable[..., bool], implementation: Any) -> None:
    """Offer ``implementation`` for ``primitive`` wherever ``condition`` of the same arguments holds."""
    _pairs.setdefault(primitive, []).append((condition, implementation))


def pick(primitive: str, *arguments: Any) -> Any:
    """The first implementation that takes these arguments, or ``None`` for the reference."""
    if _enabled:
        for condition, implementation in _pairs.get(primitive, ()):
            if condition(*arguments):
                return implementation
    return None


def available() -> tuple[str, ...]:
    """The native code that is there and may be used, for example ``("cpu-avx2",)``; empty without a compiled kernel."""
    return (f"cpu-{instruction_set()}",) if _enabled and instruction_set() else ()


def why_none() -> str:
    """Why :func:`available` is empty, and how to change that; an empty string where it is not."""
    if not _enabled:
        return "turned off by KHOT_KERNELS=0"
    return f"{REASON}; to build it: {BUILD}" if REASON else ""


def enabled() -> bool:
    """Whether native code may be used at all."""
    return _enabled


@contextmanager
def disabled() -> Iterator[None]:
    """Run the reference inside the block."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


from khot.kernels import cpu, magnitude, order, select, tournament, triton  # noqa: E402, F401  they register themselves, which needs what stands above; masked, sample and shard are imported by what uses them
