from __future__ import annotations

from typing import Any, final

from torch import Generator, Tensor, nn

from khot._tensors import Number
from khot.registry import find_design, find_method
from khot.sampling import sample_topk
from khot.soft import soft_topk


@final
class SampleTopK(nn.Module):
    """Module form of :func:`khot.sample_topk` in training; in evaluation the hard top-k with the gradient of the soft one.

    Example:
        >>> layer = SampleTopK(k=2, tau=0.1)
        >>> layer(torch.tensor([3.0, 1.0, 2.0])).sum()
        tensor(2.)
        >>> layer.eval()(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 1.])
    """

    def __init__(
        self,
        k: Number,
        tau: Number = 1.0,
        *,
        method: str = "sigmoid",
        design: str = "systematic",
        generator: Generator | None = None,
        dim: int = -1,
        **options: Any,
    ) -> None:
        super().__init__()
        find_method(method)
        find_design(design)
        self.k, self.tau, self.method, self.design, self.dim, self.options = k, tau, method, design, dim, options
        self.generator = generator

    def forward(self, scores: Tensor) -> Tensor:
        if not self.training:
            return soft_topk(scores, self.k, self.tau, method=self.method, hard=True, dim=self.dim, **self.options)
        return sample_topk(
            scores, self.k, self.tau, method=self.method, design=self.design, generator=self.generator, dim=self.dim, **self.options
        )

    def extra_repr(self) -> str:
        return f"k={self.k}, tau={self.tau}, method={self.method!r}, design={self.design!r}, dim={self.dim}"
