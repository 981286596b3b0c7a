"""Independent coin tosses."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot._tensors import source
from khot.registry import design


def poisson_log_prob(probs: Tensor, sample: Tensor) -> Tensor:
    """``(..., n), (..., n) -> (...)``."""
    return (torch.special.xlogy(sample, probs) + torch.special.xlog1py(1 - sample, -probs)).sum(-1)


@design(
    "poisson",
    cost="O(n)",
    paper="Hajek 1964",
    exact=True,
    fixed_size=False,
    note="random size",
    log_prob=poisson_log_prob,
)
def poisson(probs: Tensor, k: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Each item by itself with its probability: the size is random. The baseline.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: not used.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> poisson(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([2]))
        tensor([0., 1., 1.])
    """
    return (torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, **source(generator)) < probs).to(probs.dtype)
