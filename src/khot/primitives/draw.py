"""Samples drawn by native code, one call for all rows, and what all samplers check."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot import kernels
from khot._tensors import Number
from khot.kernels import sample as _  # noqa: F401  registers itself


def draw(
    design: str, probs: Tensor, k: Number, *, generator: Generator | None = None, order: str = "random", over: bool = False
) -> Tensor | None:
    """A random 0/1 mask like ``probs``, or ``None`` where no native code takes these tensors and the reference has to draw.

    The random numbers are a hash of a seed, the number of the row and a counter; only the seed comes from ``generator``. So rows are
    independent and the result does not depend on the number of threads.

    Args:
        design: ``"systematic"`` or ``"pivotal"``.
        probs: ``(..., n)`` in [0, 1]; a nan makes its own row nan.
        k: what the rows sum to but for rounding, a number or a ``(..., 1)`` column. A fraction draws the whole number below or above,
            with ``k`` as the mean. A row whose sum is off by more than half draws its own sum, rounded.
        order: ``"random"`` or ``"fixed"``.
        over: write the mask over ``probs``, which are dense and nobody's any more.
    """
    check_order(order)
    native = kernels.pick("draw", probs, k)
    if native is None:
        return None
    seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu", generator=generator))
    return native(design, probs, k, seed, shuffled=order == "random", over=over)


def check_order(order: str) -> None:
    if order not in ("random", "fixed"):
        raise ValueError(f"order must be 'random' or 'fixed', got {order!r}")


def refuse_generator(generator: Generator | None) -> None:
    """No operator takes a generator: say so before a compiler does."""
    if generator is not None:
        raise ValueError("generator= cannot be passed on inside torch.compile or under a dispatch mode; seed with torch.manual_seed")
