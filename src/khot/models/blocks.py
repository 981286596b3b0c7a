"""The token-mixing blocks of the TopK networks and of their controls: ``(B, N, dim) -> (B, N, dim)``, to be added to the input."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from khot.hard import straight_through, topk_mask
from khot.models.select import Selection

Mix = Literal["soft", "none", "attend"]


class DynamicBlock(nn.Module):
    r"""Gather the k best tokens of every head, scatter them back.

    With V the values of a head and W its selection of k tokens, :math:`Z = W V`, and back by attention,
    :math:`Y = \operatorname{softmax}(V Z^\top / \sqrt{d_h}) Z`, or by the transpose, :math:`Y = W^\top Z`. Before that, a linear map
    over the tokens mixes them.

    Args:
        dim: of a token; ``dim * expand`` inside.
        num_tokens: N.
        k: how many tokens a head gathers.
        scatter: ``"attention"`` (TopKDynamicModel) or ``"transpose"`` (TopKModel).
        selection: arguments of :class:`Selection`.
    """

    def __init__(
        self, dim: int, num_tokens: int, k: int, *, num_heads: int = 4, expand: int = 2, scatter: str = "attention", **selection: Any
    ) -> None:
        super().__init__()
        if scatter not in ("attention", "transpose"):
            raise ValueError(f"scatter must be 'attention' or 'transpose', got {scatter!r}")
        if dim * expand % num_heads:
            raise ValueError(f"dim * expand must be a multiple of num_heads={num_heads}, got {dim * expand}")
        inner, self.num_heads, self.scatter = dim * expand, num_heads, scatter
        head_dim = inner // num_heads
        self.expand = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, inner), nn.GELU())
        self.token_norm = nn.LayerNorm(inner)
        self.token_mix = nn.Linear(num_tokens, num_tokens)
        self.score_value = nn.Sequential(nn.LayerNorm(head_dim), nn.Linear(head_dim, head_dim + 1))
        self.select = Selection(k, **selection)
        self.out = nn.Sequential(nn.LayerNorm(inner), nn.Linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.token_norm(self.expand(x))  # (B, N, inner)
        x = F.gelu(self.token_mix(x.transpose(1, 2)))  # (B, inner, N)
        x = x.unflatten(1, (self.num_heads, -1)).transpose(2, 3)  # (B, H, N, Dh)
        score, value = self.score_value(x).tensor_split([1], -1)
        weights = self.select(score.squeeze(-1)).to(value.dtype)  # (B, H, k, N)
        gathered = weights @ value  # (B, H, k, Dh)
        if self.scatter == "attention":
            back = F.scaled_dot_product_attention(value, gathered, gathered)
        else:
            back = weights.transpose(-1, -2) @ gathered
        return self.out(back.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    r"""Select k tokens by :math:`\langle q_i, k_i\rangle`, gather and scatter their values: :math:`Y = W^\top W v`.

    In the hard limit :math:`W^\top W` is a diagonal 0/1 matrix, and the block mixes no tokens: what mixes is the softness of W.

    Args:
        mix: ``"soft"`` as published; ``"none"`` replaces :math:`W^\top W` by the hard 0/1 mask with the gradient of its soft
            diagonal, the control that cannot mix; ``"attend"`` lets the k gathered tokens attend among each other before
            they are scattered. All three have the same parameters.
        num_heads: of the attention among the k.
        selection: arguments of :class:`Selection`.
    """

    def __init__(self, dim: int, k: int, *, mix: Mix = "soft", num_heads: int = 4, **selection: Any) -> None:
        super().__init__()
        if mix not in ("soft", "none", "attend"):
            raise ValueError(f"mix must be 'soft', 'none' or 'attend', got {mix!r}")
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads={num_heads}, got {dim}")
        self.mix, self.num_heads = mix, num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.sharpness = nn.Parameter(torch.ones(1))  # fully_shard takes no scalars
        self.select = Selection(k, **selection)
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)  # each (B, N, dim)
        scores = (q * k).sum(-1)
        weights = self.select(scores, self.sharpness).to(v.dtype)  # (B, k, N)
        if self.mix == "none":
            return self.out(self._kept(weights, scores * self.sharpness) * v + v)
        gathered = weights @ v  # (B, k, dim)
        if self.mix == "attend":
            gathered = self._attend(weights @ q, weights @ k, gathered)
        return self.out(weights.transpose(1, 2) @ gathered + v)

    def _kept(self, weights: Tensor, scores: Tensor) -> Tensor:
        """The hard mask ``(B, N, 1)`` with the gradient of the diagonal of W^T W."""
        mask = topk_mask(scores, weights.shape[-2]).to(weights.dtype)
        return straight_through(mask, weights.square().sum(-2)).unsqueeze(-1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))  # (B, H, k, Dh)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class MixerBlock(nn.Module):
    """Token mixing of the MLP-mixer: an MLP over the tokens, the same for every channel (Tolstikhin et al. 2021)."""

    def __init__(self, dim: int, num_tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(num_tokens, hidden), nn.GELU(), nn.Linear(hidden, num_tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x).transpose(1, 2)).transpose(1, 2)
