"""The soft selection matrix of the TopK networks: scores of tokens to ``W`` with a learned temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from khot._tensors import Number
from khot.checks import find
from khot.registry import RELAXATIONS
from khot.soft import soft_topk_matrix

TAU_MIN, TAU_MAX = 0.2, 0.99  # the range of the published networks


class Selection(nn.Module):
    r"""Scores ``(..., N)`` to selection weights ``W`` of shape ``(..., k, N)`` whose rows sum to 1.

    The scores are standardised and multiplied by the standard deviation of the ranks :math:`1..N`,
    :math:`\sqrt{(N^2-1)/12}`, so that neighbours in rank lie about 1 apart and ``tau`` is measured in ranks, whatever the
    method and the width of the network. (Soft ranks of scores of spread 1 are all but equal.) The temperature is
    :math:`\tau = \text{tau\_scale} \cdot \sigma(t)`, ``t`` learned, clamped so that :math:`\sigma(t)` stays in [.2, .99].

    Args:
        k: how many rows.
        method: a matrix method of :data:`khot.RELAXATIONS`, or a callable ``(scores, k, tau, **options) -> (..., k, N)``.
        hard: the 0/1 matrix with the gradient of the soft one.

    Example:
        >>> Selection(2)(torch.tensor([[3.0, 1.0, 2.0]])).shape
        torch.Size([1, 2, 3])
    """

    def __init__(self, k: int, *, method: str | Callable[..., Tensor] = "softrank", hard: bool = False, **options: Any) -> None:
        super().__init__()
        if isinstance(method, str):
            find({name: row for name, row in RELAXATIONS.items() if row.matrix is not None}, method, "matrix method")
        self.k, self.method, self.hard, self.options = k, method, hard, options
        self.tau_scale = 1.0  # for a schedule: set by khot.models.set_tau_scale
        self.logit_tau = nn.Parameter(torch.zeros(1))  # fully_shard takes no scalars

    def tau(self) -> Tensor:
        """The temperature in use, a scalar with gradient."""
        bounds = [math.log(p / (1 - p)) for p in (TAU_MIN, TAU_MAX)]
        return self.tau_scale * torch.sigmoid(self.logit_tau.clamp(*bounds)).squeeze(0)

    def forward(self, scores: Tensor, scale: Number = 1.0) -> Tensor:
        """``(..., N) -> (..., k, N)``; ``scale`` multiplies the standardised scores."""
        n = scores.shape[-1]
        if self.k > n:
            raise ValueError(f"k must be at most the number of tokens, {n}, got {self.k}")
        spread = math.sqrt((n * n - 1) / 12)
        scores = F.layer_norm(scores.float(), (n,)) * (spread * scale)
        if not isinstance(self.method, str):
            return self.method(scores, self.k, self.tau(), **self.options)
        return soft_topk_matrix(scores, self.k, self.tau(), method=self.method, hard=self.hard, **self.options)

    def extra_repr(self) -> str:
        return f"k={self.k}, method={self.method!r}, hard={self.hard}"


def set_tau_scale(model: nn.Module, scale: float) -> None:
    """Multiply the temperature of every :class:`Selection` in ``model`` by ``scale``."""
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    for module in model.modules():
        if isinstance(module, Selection):
            module.tau_scale = float(scale)


@torch.no_grad()
def off_diagonal_shares(model: nn.Module, images: Tensor) -> list[float]:
    r"""How much each selection mixes tokens: the share of :math:`W^\top W` that is off its diagonal, one number per block.

    .. math:: 1 - \operatorname{tr}(W^\top W) \Big/ \textstyle\sum_{ij} (W^\top W)_{ij}

    It is 0 for a hard selection, where :math:`W^\top W` is a diagonal 0/1 matrix, and grows with the softness of ``W``.

    Args:
        model: a network with :class:`Selection` modules.
        images: a batch to measure on.

    Example:
        >>> from khot.models import create_model
        >>> model = create_model("topk_attention", preset="tiny", depth=2)
        >>> len(off_diagonal_shares(model, torch.randn(2, 1, 28, 28)))
        2
    """
    shares: list[float] = []

    def record(module: nn.Module, inputs: Any, weights: Tensor) -> None:
        # Both sums come from the rows: no N x N matrix is made.
        whole, diagonal = weights.sum(-1).square().sum(), weights.square().sum()
        shares.append(float(1 - diagonal / whole))

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, Selection)]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return shares
