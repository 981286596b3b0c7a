from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Generator, Tensor, nn

from khot._tensors import Number
from khot.checks import check_options
from khot.nn._numbers import keep, show
from khot.registry import find_design, find_method
from khot.sampling import sample_topk
from khot.soft import soft_topk


@final
class SampleTopK(nn.Module):
    """Module form of :func:`khot.sample_topk` in training; in evaluation the hard top-k with the gradient of the soft one.

    With ``num_samples`` the evaluation repeats its one mask, so that both modes return the same shape.

    Example:
        >>> layer = SampleTopK(k=2, tau=0.1)
        >>> layer(torch.tensor([3.0, 1.0, 2.0])).sum()
        tensor(2.)
        >>> layer.eval()(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 1.])
    """

    k: Number
    tau: Number

    def __init__(
        self,
        k: Number,
        tau: Number = 1.0,
        *,
        method: str = "sigmoid",
        design: str = "systematic",
        generator: Generator | None = None,
        largest: bool = True,
        dim: int = -1,
        num_samples: int | None = None,
        design_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(method, options, find_method(method).options)
        check_options(design, design_options or {}, find_design(design).options, "design")
        keep(self, k=k, tau=tau)
        self.method, self.design, self.largest, self.dim, self.options = method, design, largest, dim, options
        self.generator, self.num_samples, self.design_options = generator, num_samples, dict(design_options or {})

    def forward(self, scores: Tensor) -> Tensor:
        if self.training:
            return sample_topk(
                scores, self.k, self.tau, method=self.method, design=self.design, generator=self.generator, largest=self.largest,
                dim=self.dim, num_samples=self.num_samples, design_options=self.design_options, **self.options,
            )  # fmt: skip
        mask = soft_topk(
            scores, self.k, self.tau, method=self.method, hard=True, largest=self.largest, dim=self.dim, **self.options
        )  # fmt: skip
        return mask if self.num_samples is None else mask.expand(self.num_samples, *mask.shape)

    def extra_repr(self) -> str:
        numbers = f"k={show(self.k)}, tau={show(self.tau)}"
        return f"{numbers}, method={self.method!r}, design={self.design!r}, largest={self.largest}, dim={self.dim}"
