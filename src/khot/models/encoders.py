"""What token reduction must know of the encoders of other libraries: where their parts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A pre-norm block ``y = x + f(attention(norm1(x))); y + g(mlp(norm2(y)))``, or BERT's, whose residuals are inside its parts.

    ``after_attention`` and ``after_mlp`` name what f and g pass through: layer scale, stochastic depth, dropout.
    """

    classes: tuple[str, ...]
    norm1: str
    attention: str
    norm2: str
    after_attention: Names = ()
    after_mlp: Names = ()
    bert: bool = False

    def fits(self, block: nn.Module) -> bool:
        return any(f"{kind.__module__}.{kind.__name__}" in self.classes for kind in type(block).__mro__)


KINDS = (
    Kind(("khot.models.vit.Block",), "norm1", "attn", "norm2", ("drop_path1",), ("drop_path2",)),
    Kind(("timm.models.vision_transformer.Block",), "norm1", "attn", "norm2", ("ls1", "drop_path1"), ("ls2", "drop_path2")),
    Kind(
        ("transformers.models.vit.modeling_vit.ViTLayer", "transformers.models.deit.modeling_deit.DeiTLayer"),
        "layernorm_before",
        "attention",
        "layernorm_after",
        ("dropout",),
        ("dropout",),
    ),
    Kind(
        (
            "transformers.models.dinov2.modeling_dinov2.Dinov2Layer",
            "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer",
        ),
        "norm1",
        "attention",
        "norm2",
        ("layer_scale1", "drop_path"),
        ("layer_scale2", "drop_path"),
    ),
    Kind(("transformers.models.clip.modeling_clip.CLIPEncoderLayer",), "layer_norm1", "self_attn", "layer_norm2"),
    Kind(("transformers.models.bert.modeling_bert.BertLayer",), "", "attention", "", bert=True),
)
SUPPORTED = (
    "khot.models.ViT; timm: vit, deit, deit3, dinov2, clip and siglip image encoders; transformers: ViT, DeiT, DINOv2, CLIP vision, BERT"
)


def find_blocks(model: nn.Module) -> tuple[list[nn.Module], Kind]:
    """The encoder's blocks in order, and of what kind they are."""
    if getattr(model, "rope", None) is not None:
        raise ValueError(f"{type(model).__name__} has rotary positions, which would have to be gathered too; supported are {SUPPORTED}")
    for group in model.modules():
        children = list(group.children()) if isinstance(group, (nn.ModuleList, nn.Sequential)) else []
        for kind in KINDS:
            if children and all(kind.fits(child) for child in children):
                return children, kind
    windowed = any(hasattr(module, "window_size") or hasattr(module, "mask_unit_attn") for module in model.modules())
    reason = "attends in windows, where tokens cannot be dropped one by one" if windowed else "has no blocks that are known here"
    raise ValueError(f"{type(model).__name__} {reason}; supported are {SUPPORTED}")


def count_prefix(model: nn.Module) -> int:
    """How many tokens before the patches or words always stay: class token, distillation token, registers."""
    if hasattr(model, "num_prefix_tokens"):
        return int(model.num_prefix_tokens)  # pyright: ignore[reportArgumentType]
    config: Any = getattr(model, "config", None)
    distilled = getattr(config, "model_type", "") == "deit"
    return 1 + int(distilled) + int(getattr(config, "num_register_tokens", 0) or 0)


def projections(attention: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The linear maps that make queries and keys; the same one twice where they are fused."""
    inner: Any = getattr(attention, "self", attention)  # BERT
    for query, key in (("qkv", "qkv"), ("q_proj", "k_proj"), ("query", "key")):
        if hasattr(inner, query):
            return getattr(inner, query), getattr(inner, key)
    raise ValueError(f"{type(attention).__name__} has no qkv, q_proj or query")


def attention_row(attention: nn.Module, queries: Tensor, keys: Tensor, which: str, mask: Tensor | None) -> Tensor:
    r"""Attention that one query pays to every token, mean over heads: ``(B, P + N)`` in O(N), whatever kernel attention itself uses.

    Args:
        attention: whose heads, norms and scale are used.
        queries, keys: outputs of the projections, ``(B, T, H * Dh)``, or both the output of a fused one, ``(B, T, 3 * H * Dh)``.
        which: ``"cls"`` for the query of the first token, ``"received"`` for the mean of all queries but those of padding.
        mask: as attention takes it, boolean or to be added, ``(B or 1, 1, T or 1, T)``.
    """
    inner: Any = getattr(attention, "self", attention)
    heads = getattr(inner, "num_heads", None) or inner.num_attention_heads
    batch, tokens, _ = keys.shape
    if queries is keys:
        fused = queries.view(batch, tokens, 3, heads, -1)
        queries, keys = fused[:, :, 0], fused[:, :, 1]
    else:
        queries, keys = queries.view(batch, tokens, heads, -1), keys.view(batch, tokens, heads, -1)
    query = _normed(inner, "q_norm", queries[:, :1] if which == "cls" else queries)  # (B, 1 or T, H, Dh)
    query = query if which == "cls" else _mean_query(query, padding(mask, 0))
    keys = _normed(inner, "k_norm", keys)
    logits = query.transpose(1, 2) @ keys.permute(0, 2, 3, 1) * keys.shape[-1] ** -0.5  # (B, H, 1, T)
    if mask is not None:
        row = mask[:, :, :1] if which == "cls" else mask[:, :, -1:]
        logits = logits.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else logits + row
    return logits.softmax(-1, dtype=torch.float32).mean(1).squeeze(1)


def _normed(attention: nn.Module, name: str, x: Tensor) -> Tensor:
    """``x`` through the norm of queries or keys where there is one; it works on the last dimension."""
    norm = getattr(attention, name, None)
    return x if norm is None else norm(x)


def _mean_query(queries: Tensor, padded: Tensor | None) -> Tensor:
    """``(B, T, H, Dh) -> (B, 1, H, Dh)``, over the tokens that are no padding."""
    if padded is None:
        return queries.mean(1, keepdim=True)
    weights = (~padded).to(queries.dtype)
    return ((weights / weights.sum(1, keepdim=True))[:, :, None, None] * queries).sum(1, keepdim=True)


def padding(mask: Tensor | None, prefix: int) -> Tensor | None:
    """``(B, N)``, True where no token may be attended to; None without a mask."""
    if mask is None:
        return None
    row = mask[:, 0, 0, prefix:]
    return ~row if row.dtype == torch.bool else row <= torch.finfo(row.dtype).min / 2


def take_mask(mask: Tensor | None, kept: Tensor) -> Tensor | None:
    """The attention mask ``(B, 1, Q, T)`` of the tokens at ``kept``, ``(B, T')``."""
    if mask is None:
        return None
    heads, num_queries = mask.shape[1:3]
    mask = mask.expand(kept.shape[0], heads, num_queries, -1)
    mask = mask.gather(-1, kept[:, None, None, :].expand(-1, heads, num_queries, -1))
    if num_queries > 1:
        mask = mask.gather(-2, kept[:, None, :, None].expand(-1, heads, -1, mask.shape[-1]))
    return mask
