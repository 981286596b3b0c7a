"""What the image models share: patches, the MLP, the check of the input, and how parameters start."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Stem = Literal["linear", "conv"]


class PatchEmbed(nn.Module):
    """Images to tokens: one linear map per patch, or a stack of 3 x 3 convolutions of stride 2.

    The convolutional stem halves the image log2(patch_size) times and learns faster from few images (Xiao et al. 2021,
    "Early Convolutions Help Transformers See Better").

    Example:
        >>> PatchEmbed(28, 4, 1, 96)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 49, 96])
    """

    def __init__(self, image_size: int, patch_size: int, in_channels: int, dim: int, *, stem: Stem = "linear") -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size={patch_size}, got {image_size}")
        self.image_size, self.patch_size, self.in_channels = image_size, patch_size, in_channels
        self.num_patches = (image_size // patch_size) ** 2
        if stem == "linear":
            self.proj: nn.Module = nn.Conv2d(in_channels, dim, patch_size, patch_size)
        elif stem == "conv":
            self.proj = conv_stem(patch_size, in_channels, dim)
        else:
            raise ValueError(f"stem must be 'linear' or 'conv', got {stem!r}")

    def forward(self, images: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, N, dim)``."""
        check_images(images, self.in_channels, self.image_size)
        return self.proj(images).flatten(2).transpose(1, 2)


def conv_stem(patch_size: int, in_channels: int, dim: int) -> nn.Sequential:
    """Convolutions of stride 2 whose widths double up to ``dim``, with GELU between them."""
    halvings = patch_size.bit_length() - 1
    if patch_size != 2**halvings or not halvings:
        raise ValueError(f"stem='conv' halves the image, so patch_size must be a power of two from 2 on, got {patch_size}")
    widths = [in_channels, *(max(8, dim >> (halvings - 1 - i)) for i in range(halvings))]
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(widths):
        layers += [nn.Conv2d(narrow, wide, 3, 2, 1), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def check_images(images: Tensor, in_channels: int, image_size: int) -> None:
    """Raise unless ``images`` is ``(B, in_channels, image_size, image_size)``."""
    if images.ndim != 4 or tuple(images.shape[1:]) != (in_channels, image_size, image_size):
        raise ValueError(
            f"images must be of shape (B, {in_channels}, {image_size}, {image_size}), got {tuple(images.shape)}; "
            "resize them, or build the model with other image_size and in_channels"
        )


class Mlp(nn.Module):
    """``fc2(gelu(fc1(x)))``, with the parameter names of timm."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def init_weights(model: nn.Module) -> None:
    """Truncated normal of .02 for linear layers, zero for their biases (DeiT)."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class DropPath(nn.Module):
    """Leave out the whole residual branch of an image with probability ``rate`` in training (stochastic depth, Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.rate or not self.training:
            return x
        kept = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), dtype=x.dtype, device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


def resize_positions(positions: Tensor, num_patches: int) -> Tensor:
    """Positions ``(1, P + n, d)`` of a square grid of n patches for another number of patches; the P prefix tokens stay.

    Bicubic interpolation, as DeiT does for another resolution.
    """
    side, new = math.isqrt(positions.shape[1]), math.isqrt(num_patches)
    prefix = positions.shape[1] - side * side
    if side == new:
        return positions
    grid = positions[:, prefix:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.float(), size=(new, new), mode="bicubic", align_corners=False).to(positions.dtype)
    return torch.cat([positions[:, :prefix], grid.flatten(2).transpose(1, 2)], 1)
