"""Sparse autoencoders without a top-k, by their definitions: a penalty decides how many latents a token has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from khot.nn import SparseAutoencoder
from khot.nn.sparse_autoencoder import Coded

START = 4.0  # latents a token at the start, in multiples of k
HOLD = 0.9  # after this share of the training the penalty no longer adapts


class Penalised(nn.Module):
    """ReLU with an L1 penalty (Bricken et al. 2023), or JumpReLU with an L0 penalty (Rajamanoharan et al. 2024).

    So that the number of latents a token comes out as k, the penalty's weight grows while there are more and falls while there are fewer,
    and :meth:`settle` moves all thresholds by one amount at the end; both look at training rows only. The start is a bias or a threshold
    that leaves ``4 k`` latents: from zero, the few hundred steps of this table would not get there.
    """

    def __init__(self, d_in: int, d_sae: int, k: int, *, jump: bool, dead_after: int) -> None:
        super().__init__()
        self.inner, self.k, self.jump, self.dead_after = SparseAutoencoder(d_in, d_sae, k), k, jump, dead_after
        self.log_threshold = nn.Parameter(torch.zeros(d_sae)) if jump else None
        self.log_weight, self.width, self.progress = math.log(1e-2), 0.1, 0.0
        self.stats: dict[str, Tensor] = {}
        self.register_buffer("silent", torch.zeros(d_sae, dtype=torch.long), persistent=False)
        self.silent: Tensor

    @torch.no_grad()
    def center(self, x: Tensor) -> None:
        self.inner.center(x)
        pre = self._pre(x)
        level = pre.flatten().kthvalue(pre.numel() - round(START * self.k * len(x))).values
        self.width = 0.1 * float(pre.std())
        if self.log_threshold is None:
            self.inner.b_enc.fill_(-level)
        else:
            self.log_threshold.fill_(math.log(float(level)))

    @torch.no_grad()
    def settle(self, x: Tensor) -> None:
        """Exactly k latents a row on average over these rows: all biases down, or all thresholds up, by the same amount."""
        pre = self._pre(x)
        above = pre if self.log_threshold is None else pre - self.log_threshold.exp()
        level = above.flatten().kthvalue(above.numel() - self.k * len(x)).values
        if self.log_threshold is None:
            self.inner.b_enc -= level
        else:
            self.log_threshold.copy_((self.log_threshold.exp() + level).clamp(min=1e-6).log())

    def _pre(self, x: Tensor) -> Tensor:
        return (x - self.inner.b_dec) @ self.inner.W_enc + self.inner.b_enc

    def forward(self, x: Tensor) -> Coded:
        pre = self._pre(x)
        if self.log_threshold is None:
            return self._coded(pre.relu())
        return self._coded(pre * self._open(pre))

    def _coded(self, latents: Tensor) -> Coded:
        return Coded(self.inner.decode(latents), latents)

    def loss(self, x: Tensor) -> Tensor:
        recon, latents = self(x)
        fvu = (x - recon).square().sum() / (x - x.mean(0)).square().sum()
        active = latents.detach() != 0
        l0 = active.sum(-1).double().mean()
        self.silent.copy_(torch.where(active.any(0), 0, self.silent + len(x)))
        self.stats = {"fvu": fvu.detach(), "l0": l0, "dead": (self.silent > self.dead_after).float().mean()}
        return fvu + self._weight(float(l0)) * self._penalty(x, latents)

    def _weight(self, l0: float) -> float:
        """A controller with a proportional and an integral part; the second is fixed at the end."""
        away = max(-1.0, min(1.0, math.log(max(l0, 1e-3) / self.k)))
        self.log_weight += 0.02 * away if self.progress < HOLD else 0.0
        return math.exp(self.log_weight + 2 * away)

    def _penalty(self, x: Tensor, latents: Tensor) -> Tensor:
        if self.log_threshold is None:
            return latents.sum(-1).mean()
        return self._open(self._pre(x)).sum(-1).mean()

    def _open(self, pre: Tensor) -> Tensor:
        assert self.log_threshold is not None
        return _Step.apply(pre, self.log_threshold.exp(), self.width)  # pyright: ignore[reportReturnType]


class _Step(Function):
    """1 above the threshold. Its derivative in the threshold is that of a ramp as wide as ``width``; in the input it has none."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.width = width
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.width / 2
        return None, -(grad * near).sum(0) / ctx.width, None
