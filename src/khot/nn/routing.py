"""What a router decided, and what follows from it: losses and statistics."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Choice: TypeAlias = Literal["token", "expert"]


class Gate(NamedTuple):
    """Three tensors in the order that transformers' routers return them."""

    logits: Tensor
    weights: Tensor
    indices: Tensor


class Routing(NamedTuple):
    """Where tokens go. ``T`` tokens, ``E`` experts, ``m`` places.

    Attributes:
        logits: ``(T, E)``.
        weights: how much each place counts: ``(T, m)`` where tokens choose, ``(E, m)`` where experts do.
        indices: like ``weights``: the expert of each place of a token, or the token of each place of an expert.
        mask: ``(T, E)``, the soft mask with its gradient; in evaluation the hard one.
        choice: who chooses, ``"token"`` or ``"expert"``.
    """

    logits: Tensor
    weights: Tensor
    indices: Tensor
    mask: Tensor
    choice: Choice = "token"

    @property
    def load(self) -> Tensor:
        """``(E,)``: how many tokens each expert receives; places of weight 0 do not count."""
        experts = self.indices if self.choice == "token" else _rows(self.indices)
        return count(experts.flatten(), self.logits.shape[-1], (self.weights.detach() != 0).flatten())

    def balance_loss(self) -> Tensor:
        r"""How unevenly the soft mask is shared out: 1 where every expert has the same share, ``E / k`` at worst.

        .. math:: E \sum_e \Big( \frac{\sum_t m_{te}}{\sum_{t, e} m_{te}} \Big)^2

        It looks at the soft mask, all of it: a loss on the chosen entries alone can be lowered without balancing anything.
        """
        total = self.mask.sum(dtype=torch.float32)
        share = self.mask.sum(0, dtype=torch.float32) / torch.where(total != 0, total, 1.0)  # 0 where there is no token
        return self.logits.shape[-1] * share.square().sum()

    def z_loss(self) -> Tensor:
        """Mean square of the logits' log-sum-exp, which keeps them small (Zoph et al. 2022)."""
        return self.logits.float().logsumexp(-1).square().sum() / max(1, self.logits.shape[0])

    def stats(self) -> dict[str, float]:
        """Coefficient of variation of the load, experts in use, mean experts a token, share of places without a token."""
        load, used = self.load.double(), (self.weights.detach() != 0).sum()
        return {
            "load_cv": float(load.std(correction=0) / load.mean()),
            "experts_used": float((load > 0).sum()),
            "active": float(used / max(1, self.logits.shape[0])),
            "dropped": float(1 - used / max(1, self.weights.numel())),
        }


def _rows(indices: Tensor) -> Tensor:
    """The number of its row at every place."""
    return torch.arange(indices.shape[0], device=indices.device).unsqueeze(-1).expand_as(indices)


def count(experts: Tensor, num_experts: int, there: Tensor | None = None) -> Tensor:
    """How often each expert appears, of the places that are ``there``."""
    ones = torch.ones_like(experts) if there is None else there.to(experts.dtype)
    return torch.zeros(num_experts, dtype=experts.dtype, device=experts.device).scatter_add(0, experts, ones)
