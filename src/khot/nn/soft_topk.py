from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from khot._tensors import Number
from khot.registry import find_method
from khot.soft import soft_topk


@final
class SoftTopK(nn.Module):
    """Module form of :func:`khot.soft_topk`; ``method`` may also be a callable ``(scores, k, tau, **options) -> mask``.

    Example:
        >>> SoftTopK(k=2, tau=0.1)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1.0000, 0.0067, 0.9933])
    """

    def __init__(
        self,
        k: Number,
        tau: Number = 1.0,
        *,
        method: str | Callable[..., Tensor] = "sigmoid",
        hard: bool = False,
        dim: int = -1,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(method, str):
            find_method(method)
        self.k, self.tau, self.method, self.hard, self.dim, self.options = k, tau, method, hard, dim, options

    def forward(self, scores: Tensor) -> Tensor:
        if isinstance(self.method, str):
            return soft_topk(scores, self.k, self.tau, method=self.method, hard=self.hard, dim=self.dim, **self.options)
        return self.method(scores, self.k, self.tau, **self.options)

    def extra_repr(self) -> str:
        return f"k={self.k}, tau={self.tau}, method={self.method!r}, hard={self.hard}, dim={self.dim}"
