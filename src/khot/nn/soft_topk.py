from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from khot._tensors import Number
from khot.checks import check_options
from khot.nn._numbers import keep, show
from khot.registry import find_method
from khot.soft import soft_topk


@final
class SoftTopK(nn.Module):
    """Module form of :func:`khot.soft_topk`. A tensor ``k`` or ``tau`` is a buffer, an ``nn.Parameter`` is learned.

    Example:
        >>> SoftTopK(k=2, tau=0.1)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1.0000, 0.0067, 0.9933])
    """

    k: Number
    tau: Number

    def __init__(
        self,
        k: Number,
        tau: Number = 1.0,
        *,
        method: str | Callable[..., Tensor] = "sigmoid",
        hard: bool = False,
        largest: bool = True,
        dim: int = -1,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(method, str):
            check_options(method, options, find_method(method).options)
        keep(self, k=k, tau=tau)
        self.method, self.hard, self.largest, self.dim, self.options = method, hard, largest, dim, options

    def forward(self, scores: Tensor) -> Tensor:
        return soft_topk(scores, self.k, self.tau, method=self.method, hard=self.hard, largest=self.largest, dim=self.dim, **self.options)

    def extra_repr(self) -> str:
        return f"k={show(self.k)}, tau={show(self.tau)}, method={self.method!r}, hard={self.hard}, largest={self.largest}, dim={self.dim}"
