"""The TopK networks: patches, ``depth`` times {token mixing by a selection of k tokens, MLP}, mean, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from khot.models.blocks import AttentionBlock, DynamicBlock, Mix, MixerBlock
from khot.models.parts import DropPath, Mlp, PatchEmbed, Stem, init_weights


class Layer(nn.Module):
    """``x += mixer(x); x += mlp(norm(x))``."""

    def __init__(self, mixer: nn.Module, dim: int, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, round(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mixer(x))
        return x + self.drop_path(self.mlp(self.norm(x)))


class TokenNet(nn.Module):
    """The body that the TopK networks and the mixer share; they differ in the block that mixes tokens.

    Args:
        make_mixer: ``(num_tokens) -> block``, called once per layer.
        head_ratio: width of the hidden layer of the head, in ``dim``.
    """

    def __init__(
        self,
        make_mixer: Callable[[int], nn.Module],
        *,
        dim: int,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        head_ratio: float = 8.0,
        drop_path: float = 0.0,
        stem: Stem = "linear",
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.patch_embed = PatchEmbed(image_size, patch_size, in_channels, dim, stem=stem)
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches, dim))
        rates = [drop_path * i / max(1, depth - 1) for i in range(depth)]
        self.layers = nn.Sequential(*(Layer(make_mixer(self.patch_embed.num_patches), dim, mlp_ratio, rate) for rate in rates))
        hidden = round(dim * head_ratio)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, num_classes))
        init_weights(self)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """``(B, in_channels, image_size, image_size) -> (B, num_classes)``."""
        return self.head(self.layers(self.patch_embed(images) + self.pos_embed).mean(1))


def _check_k(k: int, num_tokens: int) -> int:
    if not isinstance(k, int) or not 1 <= k <= num_tokens:
        raise ValueError(f"k must be between 1 and the number of tokens, {num_tokens}, got {k}")
    return k


class TopKDynamicModel(TokenNet):
    r"""Every head gathers its k best tokens and all tokens attend to them.

    4.19 M parameters at ``dim=128, k=96`` for ImageNet. Block: :class:`khot.models.blocks.DynamicBlock`.

    Args:
        dim: of a token.
        k: how many tokens a head gathers, of ``(image_size / patch_size)^2``.
        num_heads, expand: heads, and the factor by which a block is wider inside.
        method: a matrix method of :data:`khot.RELAXATIONS` or a callable; ``method_options`` are its own.
        hard: select by the 0/1 matrix, with the gradient of the soft one.
        body: of :class:`TokenNet`: ``image_size, patch_size, in_channels, num_classes, depth, mlp_ratio, stem`` ...

    Example:
        >>> model = TopKDynamicModel(dim=32, k=8, image_size=28, patch_size=4, in_channels=1, num_classes=10, depth=2)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Source of the architecture: KeithG33/TopKNets, with its positions, temperatures and scales corrected.
    """

    def __init__(
        self,
        dim: int = 128,
        k: int = 96,
        *,
        num_heads: int = 4,
        expand: int = 2,
        method: str | Callable[..., Tensor] = "softrank",
        hard: bool = False,
        method_options: dict[str, Any] | None = None,
        **body: Any,
    ) -> None:
        options: dict[str, Any] = dict(num_heads=num_heads, expand=expand, method=method, hard=hard, **(method_options or {}))
        super().__init__(lambda n: DynamicBlock(dim, n, _check_k(k, n), **options), dim=dim, **body)


class TopKModel(TokenNet):
    """As :class:`TopKDynamicModel` with one head, no expansion, and the way back by the transpose of W.

    Example:
        >>> model = TopKModel(dim=32, k=8, image_size=28, patch_size=4, in_channels=1, num_classes=10, depth=2)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int = 128,
        k: int = 96,
        *,
        method: str | Callable[..., Tensor] = "softrank",
        hard: bool = False,
        method_options: dict[str, Any] | None = None,
        **body: Any,
    ) -> None:
        options: dict[str, Any] = dict(num_heads=1, expand=1, scatter="transpose", method=method, hard=hard, **(method_options or {}))
        super().__init__(lambda n: DynamicBlock(dim, n, _check_k(k, n), **options), dim=dim, **body)


class TopKAttentionModel(TokenNet):
    r"""Tokens are selected by :math:`\langle q_i, k_i \rangle` and mixed by :math:`W^\top W`.

    3.67 M parameters at ``dim=128, k=96`` for ImageNet. Block: :class:`khot.models.blocks.AttentionBlock`. In the hard limit
    it mixes no tokens; :func:`khot.models.off_diagonal_shares` tells how much it mixes.

    Args:
        mix: ``"soft"`` as published, ``"none"`` for the control that cannot mix, ``"attend"`` for attention among the k.
        num_heads: of that attention.

    The other arguments are those of :class:`TopKDynamicModel`.

    Example:
        >>> model = TopKAttentionModel(dim=32, k=8, image_size=28, patch_size=4, in_channels=1, num_classes=10, depth=2)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int = 128,
        k: int = 96,
        *,
        mix: Mix = "soft",
        num_heads: int = 4,
        method: str | Callable[..., Tensor] = "softrank",
        hard: bool = False,
        method_options: dict[str, Any] | None = None,
        **body: Any,
    ) -> None:
        options: dict[str, Any] = dict(mix=mix, num_heads=num_heads, method=method, hard=hard, **(method_options or {}))
        super().__init__(lambda n: AttentionBlock(dim, _check_k(k, n), **options), dim=dim, **body)


class Mixer(TokenNet):
    """MLP-mixer with the body of the TopK networks: the control that mixes tokens by a fixed learned map.

    Example:
        >>> Mixer(dim=32, image_size=28, patch_size=4, in_channels=1, num_classes=10, depth=2)(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Paper: Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision".
    """

    def __init__(self, dim: int = 128, *, tokens_hidden: int = 256, **body: Any) -> None:
        super().__init__(lambda n: MixerBlock(dim, n, tokens_hidden), dim=dim, **body)
