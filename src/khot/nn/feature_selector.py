from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import final

import torch
from torch import Tensor, nn

from khot.hard import topk_mask
from khot.nn.annealing import Annealed, Method, Range, check_count, check_method, check_width, relaxed_mask


@final
class FeatureSelector(Annealed):
    r"""Learns which ``k`` of the input's features to let through.

    .. math:: y = x \odot m, \qquad m = \text{soft top-}k\text{ of the scores, hard at the end and in evaluation}

    While ``progress`` is below ``until`` the mask is relaxed and its temperature falls; from there on, and in evaluation, it is the hard
    one and the rest of the network trains on exactly ``k`` features. The scores learn best at about ten times the network's rate.

    Args:
        num_features: size of the input's last dimension.
        k: how many to let through.
        tau: temperature, or where it starts and ends, in units of the scores' spread (at least 1, as the scores start equal).
        method: a name in :data:`khot.RELAXATIONS` or a callable ``(scores, k, tau) -> mask``.
        hard: train with the hard mask and the gradient of the soft one.
        design: a name in :data:`khot.DESIGNS`: train with one sampled mask of exactly ``k`` features in each step.
        always: features that must stay; they count among the ``k``.
        until: the share of the training in which the choice is made.

    Example:
        >>> layer = FeatureSelector(6, k=2, always=[4]).eval()
        >>> layer.indices
        tensor([0, 4])
        >>> layer(torch.ones(1, 6))
        tensor([[1., 0., 0., 0., 1., 0.]])
    """

    def __init__(
        self,
        num_features: int,
        k: int,
        *,
        tau: Range = (3.0, 0.1),
        method: Method = "sigmoid",
        hard: bool = False,
        design: str | None = None,
        always: Sequence[int] = (),
        until: float = 0.5,
    ) -> None:
        super().__init__(tau, until)
        check_method(method, design)
        self.k = check_count(k, "k", num_features, "num_features")
        self.num_features, self.method, self.hard, self.design = num_features, method, hard, design
        self.scores = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("always", _check_always(always, num_features, k))
        self.always: Tensor

    @property
    def mask(self) -> Tensor:
        """What the input is multiplied by: relaxed while training before ``until``, else k-hot."""
        if not self.training or self.settled:
            return topk_mask(self._fixed(), self.k)
        return self._relaxed(self.hard, self.design)

    @property
    def probabilities(self) -> Tensor:
        """The soft mask at the present temperature: how likely each feature is to be let through."""
        return self._relaxed(False, None)

    @property
    def indices(self) -> Tensor:
        """``(k,)``: the features that are let through in evaluation, in order."""
        return topk_mask(self._fixed(), self.k).nonzero().squeeze(-1)

    def _fixed(self) -> Tensor:
        """The scores, +inf for what must stay."""
        return self.scores.masked_fill(self.always, torch.inf)

    def _relaxed(self, hard: bool, design: str | None) -> Tensor:
        return relaxed_mask(self._fixed(), self.k, self.tau, method=self.method, hard=hard, design=design, least=1.0)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.num_features)
        mask = self.mask
        return x * (mask.to(x.dtype) if x.is_floating_point() or x.is_complex() else mask)  # a mask of whole numbers would be 0

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}, k={self.k}, method={self.method!r}, hard={self.hard}, design={self.design!r}"


def _check_always(always: Sequence[int], n: int, k: int) -> Tensor:
    """A mask of the features that must stay."""
    if not all(isinstance(feature, Integral) and not isinstance(feature, bool) for feature in always):
        raise ValueError(f"always must name features by whole numbers, got {list(always)}")
    index = [int(feature) for feature in always]
    if len(set(index)) != len(index) or any(not 0 <= feature < n for feature in index):
        raise ValueError(f"always must name different features between 0 and {n - 1}, got {index}")
    if len(index) > k:
        raise ValueError(f"always names {len(index)} features, more than k={k}; raise k or shorten it")
    mask = torch.zeros(n, dtype=torch.bool)
    mask[index] = True
    return mask
