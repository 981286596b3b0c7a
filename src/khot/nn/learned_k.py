from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot.nn.annealing import check_width


@final
class LearnedK(nn.Module):
    r"""How many to select, learned per row, with a penalty that holds the mean.

    .. math:: k(x) = \ell + (h - \ell)\,\sigma(w \cdot x + b)

    At the start ``w`` is 0 and ``b`` such that :math:`k(x)` is ``mean`` for every row. The relaxations whose row in
    :data:`khot.RELAXATIONS` says ``grad_k`` give ``k`` its gradient.

    Args:
        dim: features of a row.
        mean: what ``k`` is on average.
        low: the smallest ``k``.
        high: the largest ``k``; by default ``4 * mean``.

    Example:
        >>> learned = LearnedK(16, mean=8)
        >>> k = learned(torch.randn(3, 16))  # (3,), fractions between 1 and 32
        >>> k
        tensor([8., 8., 8.], grad_fn=<AddBackward0>)
        >>> learned.penalty(k).item()
        0.0
    """

    def __init__(self, dim: int, mean: float, *, low: float = 1.0, high: float | None = None) -> None:
        super().__init__()
        high = 4.0 * mean if high is None else float(high)
        if not 0 <= low < mean < high:
            raise ValueError(f"low < mean < high must hold with low at least 0, got low={low}, mean={mean}, high={high}")
        self.dim, self.mean, self.low, self.high = dim, float(mean), float(low), high
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.tensor([math.log((mean - low) / (high - mean))]))  # fully_shard takes no scalars

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim) -> (...)``."""
        check_width(x, self.dim)
        logit = F.linear(x, self.weight.unsqueeze(0)).squeeze(-1).float() + self.bias.float().squeeze(0)
        return self.low + (self.high - self.low) * torch.sigmoid(logit)

    def penalty(self, k: Tensor) -> Tensor:
        """The squared relative distance of the mean of ``k`` from ``mean``; add it to the loss."""
        return ((k.mean() - self.mean) / self.mean).square()

    def extra_repr(self) -> str:
        return f"dim={self.dim}, mean={self.mean:g}, low={self.low:g}, high={self.high:g}"
