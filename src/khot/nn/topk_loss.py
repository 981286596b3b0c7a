from __future__ import annotations

from typing import Literal, final

from torch import Tensor, nn

from khot._tensors import Number
from khot.loss import topk_loss
from khot.nn._numbers import keep, show


@final
class TopKLoss(nn.Module):
    """Module form of :func:`khot.topk_loss`.

    Example:
        >>> TopKLoss()(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 1.0]))
        tensor(1.1222)
    """

    tau: Number

    def __init__(
        self,
        tau: Number = 1.0,
        *,
        method: str = "sigmoid",
        dim: int = -1,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        keep(self, tau=tau)
        self.method, self.dim = method, dim
        self.reduction: Literal["mean", "sum", "none"] = reduction

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return topk_loss(scores, target, self.tau, method=self.method, dim=self.dim, reduction=self.reduction)

    def extra_repr(self) -> str:
        return f"tau={show(self.tau)}, method={self.method!r}, dim={self.dim}, reduction={self.reduction!r}"
