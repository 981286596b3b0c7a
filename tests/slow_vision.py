"""Token reduction done slowly, with the whole attention matrix: what the quick one must equal."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from khot.models import ViT

SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 4, "in_channels": 3, "num_classes": 5, "dim": 32, "depth": 4, "num_heads": 4}


def vit(**changes: Any) -> ViT:
    return ViT(**SMALL | changes).eval()


def images(batch: int = 2, size: int = 32) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


LIBRARIES: list[Any] = []


def with_torchvision(name: str) -> Any:
    """``name``, which imports torchvision if it is there; one that was built for another torch lacks two operators."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        LIBRARIES.append(torch.library.Library("torchvision", "DEF"))  # it lives as long as this list
        for operator in ("nms", "qnms"):
            LIBRARIES[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip(name)


def eager_attention(attn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and the whole N x N softmax of timm's and our attention."""
    batch, n, _ = x.shape
    q, k, v = attn.qkv(x).reshape(batch, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = (getattr(attn, f"{name}_norm", nn.Identity())(part) for name, part in (("q", q), ("k", k)))
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return attn.proj((weights @ v).transpose(1, 2).reshape(batch, n, -1)), weights


def slow_blocks(blocks: Any, x: Tensor, keep: float, at: tuple[int, ...], prefix: int, score: str, fuse: bool) -> Tensor:
    """Haurum's Top-K and EViT as published, one block and one image after the other."""
    total = x.shape[1] - prefix
    for i, block in enumerate(blocks):
        before = x
        out, weights = eager_attention(block.attn, block.norm1(x))
        x = x + getattr(block, "ls1", nn.Identity())(out)
        if i in at:
            count = math.floor(total * keep ** (sorted(at).index(i) + 1) + 1e-9)
            row = (weights[:, :, 0].mean(1) if score == "cls" else mean_query_row(block, before))[:, prefix:]
            x = torch.stack([slow_reduce(tokens, scores, count, prefix, fuse) for tokens, scores in zip(x, row, strict=True)])
        x = x + getattr(block, "ls2", nn.Identity())(block.mlp(block.norm2(x)))
    return x


def mean_query_row(block: Any, x: Tensor) -> Tensor:
    attn, batch, n = block.attn, len(x), x.shape[1]
    q, k, _ = attn.qkv(block.norm1(x)).reshape(batch, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    return (q.mean(2, keepdim=True) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1).mean(1)[:, 0]


def slow_reduce(tokens: Tensor, scores: Tensor, count: int, prefix: int, fuse: bool) -> Tensor:
    order = sorted(range(len(scores)), key=lambda i: -float(scores[i].detach()))
    kept = [tokens[:prefix], tokens[prefix:][order[:count]]]
    if fuse:
        kept.append(sum(scores[i] * tokens[prefix + i] for i in order[count:])[None])
    return torch.cat(kept)


def slow_vit(model: ViT, x: Tensor, **settings: Any) -> Tensor:
    tokens = torch.cat([model.cls_token.expand(len(x), -1, -1), model.patch_embed(x)], 1) + model.pos_embed
    tokens = model.norm(slow_blocks(model.blocks, tokens, prefix=1, **settings))
    return model.head(tokens[:, 0] if model.pool == "cls" else tokens[:, 1:].mean(1))
