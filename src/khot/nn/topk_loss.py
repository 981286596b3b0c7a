from __future__ import annotations

from typing import Literal, final

from torch import Tensor, nn

from khot._tensors import Number
from khot.loss import topk_loss


@final
class TopKLoss(nn.Module):
    """Module form of :func:`khot.topk_loss`."""

    def __init__(
        self,
        tau: Number = 1.0,
        *,
        method: str = "sigmoid",
        dim: int = -1,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        self.tau, self.method, self.dim = tau, method, dim
        self.reduction: Literal["mean", "sum", "none"] = reduction

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return topk_loss(scores, target, self.tau, method=self.method, dim=self.dim, reduction=self.reduction)
