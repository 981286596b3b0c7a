from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from khot.hard import topk_mask
from khot.nn.annealing import Annealed, Method, Range, check_method, check_share, check_width, cubic, relaxed_mask, share_of


@final
class SparseLinear(Annealed):
    """A linear layer that learns which ``density * in_features * out_features`` of its weights to keep.

    For one layer what :func:`khot.nn.sparsify` is for a model: a weight's score is its magnitude, the density falls from 1 along a
    cubic, and from ``until`` on the zeros stay.

    Args:
        in_features, out_features, bias: as in ``torch.nn.Linear``.
        density: the share of the weights that is left, in (0, 1].
        method: a name in :data:`khot.RELAXATIONS` or a callable ``(scores, k, tau) -> mask``.
        hard: train with the hard mask and the gradient of the soft one.
        tau: temperature, or where it starts and ends, in units of the magnitudes' spread.
        until: the share of the training in which the choice is made.

    Example:
        >>> layer = SparseLinear(20, 10, density=0.05)
        >>> khot.nn.anneal(layer, 1.0)
        >>> layer.to_linear().weight.count_nonzero()
        tensor(10)
    """

    mask: Tensor
    budget: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        density: float,
        *,
        bias: bool = True,
        method: Method = "sigmoid",
        hard: bool = False,
        tau: Range = (0.5, 0.05),
        until: float = 2 / 3,
    ) -> None:
        super().__init__(tau, until)
        check_method(method)
        self.in_features, self.out_features, self.method, self.hard = in_features, out_features, method, hard
        self.target = check_share(density, "density")
        bound = 1 / math.sqrt(max(1, in_features))
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound)) if bias else None
        self.register_buffer("mask", torch.ones(out_features, in_features, dtype=torch.bool))
        self.count = self.weight.numel()
        self.register_buffer("budget", torch.tensor(self.count), persistent=False)

    def anneal(self, progress: float) -> None:
        was = self.settled
        super().anneal(progress)
        self.count = share_of(self.weight.numel(), cubic((1.0, self.target), self.progress / self.until))
        self.budget.fill_(self.count)
        if self.settled and not was and bool(self.mask.all()):
            self.mask.copy_(self._hard().bool())
        if was and not self.settled:
            self.mask.fill_(True)  # the choice is open again

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.in_features)
        return F.linear(x, self.weight * self._mask(), self.bias)

    def to_linear(self) -> nn.Linear:
        """A plain layer with the weights that are kept and exact zeros."""
        device, dtype = self.weight.device, self.weight.dtype
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device=device, dtype=dtype)
        with torch.no_grad():
            plain.weight.copy_(self.weight * (self.mask if self.settled else self._hard()))
            if self.bias is not None:
                plain.bias.copy_(self.bias)
        return plain

    def _mask(self) -> Tensor:
        if self.settled:
            return self.mask
        if not self.training:
            return self._hard()
        scores, k = self.weight.abs().flatten(), self.budget if is_compiling() else self.count
        return relaxed_mask(scores, k, self.tau, method=self.method, hard=self.hard).view_as(self.weight)

    def _hard(self) -> Tensor:
        return topk_mask(self.weight.abs().flatten(), share_of(self.weight.numel(), self.target)).view_as(self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, density={self.target}, method={self.method!r}"
