"""What token reduction must know of the encoders of other libraries: where their parts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

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


def head_weights(attention: nn.Module) -> Tensor:
    """``(H, H * Dh)``: row h has 1 / sqrt(Dh) at the entries of head h and 0 elsewhere. One product with it parts a query by heads."""
    inner: Any = getattr(attention, "self", attention)
    heads = getattr(inner, "num_heads", None) or inner.num_attention_heads
    query, key = projections(attention)
    width = cast(nn.Linear, query).out_features // (3 if query is key else 1)
    like = cast(nn.Linear, query).weight
    return torch.eye(heads, dtype=like.dtype, device=like.device).repeat_interleave(width // heads, 1) * (width // heads) ** -0.5


def attention_row(
    attention: nn.Module, heads: Tensor, queries: Tensor, keys: Tensor, which: str, mask: Tensor | None, *, normed: bool = True
) -> Tensor:
    r"""Attention that one query pays to every token, mean over heads: ``(B, P + N)`` in O(N), whatever kernel attention itself uses.

    Every operation counts where a batch is one image: heads are parted by a product with ``heads`` instead of views.

    Args:
        attention: whose norms are used.
        heads: of :func:`head_weights`.
        queries, keys: outputs of the projections, ``(B, T, H * Dh)``, or both the output of a fused one, ``(B, T, 3 * H * Dh)``.
        which: ``"cls"`` for the query of the first token, ``"received"`` for the mean of all queries but those of padding.
        mask: as attention takes it, boolean or to be added, ``(B or 1, 1, T or 1, T)``.
        normed: whether queries and keys are normed before they meet, see :func:`has_norms`.
    """
    count, width = heads.shape
    if queries is keys:
        keys = queries[:, :, width : 2 * width]
        queries = queries[:, 0, :width] if which == "cls" else queries[:, :, :width]  # (B, H * Dh) or (B, T, H * Dh)
    elif which == "cls":
        queries = queries[:, 0]
    if normed:
        queries, keys = _normed(attention, "q_norm", queries, count), _normed(attention, "k_norm", keys, count)
    query = queries if which == "cls" else _mean_query(queries, padding(mask, 0))  # (B, H * Dh)
    logits = torch.bmm(query.unsqueeze(1) * heads, keys.mT)  # (B, H, T)
    if mask is not None:
        row = mask[:, 0, :1] if which == "cls" else mask[:, 0, -1:]
        logits = logits.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else logits + row
    return logits.softmax(-1, dtype=torch.float32).mean(1)


def has_norms(attention: nn.Module) -> bool:
    """Whether queries or keys pass through a norm of their own."""
    norms = [getattr(getattr(attention, "self", attention), name, None) for name in ("q_norm", "k_norm")]
    return not all(norm is None or isinstance(norm, nn.Identity) for norm in norms)


def _normed(attention: nn.Module, name: str, x: Tensor, heads: int) -> Tensor:
    """``x`` through the norm of queries or keys, which works on each head."""
    norm = getattr(getattr(attention, "self", attention), name, None)
    return x if norm is None else norm(x.unflatten(-1, (heads, -1))).flatten(-2)


def _mean_query(queries: Tensor, padded: Tensor | None) -> Tensor:
    """``(B, T, H * Dh) -> (B, H * Dh)``, over the tokens that are no padding."""
    if padded is None:
        return queries.mean(1)
    weights = (~padded).to(queries.dtype)
    return torch.bmm((weights / weights.sum(1, keepdim=True)).unsqueeze(1), queries).squeeze(1)


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
