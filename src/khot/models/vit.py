from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from khot.models.parts import DropPath, Mlp, PatchEmbed, Stem, init_weights, resize_positions


class Attention(nn.Module):
    """Multi-head self-attention by the fused kernel, with the parameter names of timm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads={num_heads}, got {dim}")
        self.num_heads, self.head_dim, self.scale = num_heads, dim // num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, dim = x.shape
        q, k, v = self.qkv(x).view(batch, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)  # each (B, H, N, Dh)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, n, dim))


class Block(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, round(dim * mlp_ratio))
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    r"""Vision transformer with a class token, as DeiT has it; reads the state dicts of DeiT and timm.

    Tokens :math:`[c; E p_1; \dots; E p_N] + \text{pos}` pass through ``depth`` blocks; the class token is the output
    (``pool="cls"``), or the mean of the patch tokens (``pool="mean"``).

    Args:
        image_size: height and width.
        patch_size: side of a patch; there are ``(image_size / patch_size)^2`` of them.
        stem: ``"linear"`` as published, or ``"conv"``: convolutions of stride 2 instead of one linear map.
        drop_path: rate of stochastic depth in the last block; it grows linearly from 0 in the first.

    Shape:
        ``(B, in_channels, image_size, image_size) -> (B, num_classes)``.

    Example:
        >>> model = ViT(image_size=28, patch_size=4, in_channels=1, num_classes=10, dim=96, depth=6, num_heads=3)
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Papers: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words"; Touvron et al. 2021, "Training data-efficient image
    transformers" (DeiT).
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        stem: Stem = "linear",
        pool: str = "cls",
    ) -> None:
        super().__init__()
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool must be 'cls' or 'mean', got {pool!r}")
        self.num_classes, self.pool, self.num_prefix_tokens = num_classes, pool, 1
        self.patch_embed = PatchEmbed(image_size, patch_size, in_channels, dim, stem=stem)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.patch_embed.num_patches, dim))
        rates = [drop_path * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(Block(dim, num_heads, mlp_ratio, rate) for rate in rates))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        init_weights(self)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward_features(self, images: Tensor) -> Tensor:
        """The normalised tokens ``(B, 1 + N, dim)`` after the last block."""
        patches = self.patch_embed(images)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], 1) + self.pos_embed
        return self.norm(self.blocks(tokens))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.forward_features(images)
        return self.head(tokens[:, 0] if self.pool == "cls" else tokens[:, 1:].mean(1))

    def load_pretrained(self, state: Mapping[str, Any]) -> ViT:
        """Load a state dict of DeiT or timm, or a checkpoint that holds one under ``"model"``; returns the model.

        Positions are interpolated where the resolution differs, and a head for another number of classes stays as it was
        initialised. Every other name and shape must fit.
        """
        tensors = dict(state.get("model", state))
        if "pos_embed" in tensors:
            tensors["pos_embed"] = resize_positions(tensors["pos_embed"], self.patch_embed.num_patches)
        if "head.bias" in tensors and len(tensors["head.bias"]) != self.num_classes:
            tensors |= {"head.weight": self.head.weight.detach(), "head.bias": self.head.bias.detach()}
        self.load_state_dict(tensors)
        return self
