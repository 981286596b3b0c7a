"""What a plain vision transformer is made of, read from the modules of others: weights by role, nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_GELU = (nn.GELU,)
_EXACT = "certify knows plain vision transformers: linear patches, pre-norm blocks, softmax attention, a GELU or ReLU MLP, a class token"


@dataclass(frozen=True)
class Norm:
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Map:
    """``x W^T + b``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class BlockPlan:
    norm1: Norm
    qkv: Map
    proj: Map
    norm2: Norm
    fc1: Map
    fc2: Map
    activation: str  # "gelu" or "relu"
    num_heads: int


@dataclass(frozen=True)
class Plan:
    """Images to logits."""

    patch: Map
    patch_size: int
    prefix: Tensor  # (1, P, D), the class token first
    positions: Tensor  # (1, P + N, D)
    blocks: tuple[BlockPlan, ...]
    norm: Norm
    head: Map

    @property
    def num_patches(self) -> int:
        return self.positions.shape[1] - self.prefix.shape[1]


def read(model: nn.Module) -> Plan:
    """The plan of a model of ours, of timm's ``VisionTransformer``, or of transformers' ``ViTForImageClassification``."""
    if hasattr(model, "vit") and hasattr(model, "classifier"):
        return _read_transformers(model)
    if all(hasattr(model, name) for name in ("patch_embed", "cls_token", "pos_embed", "blocks", "norm", "head")):
        return _read_timm(model)
    raise TypeError(f"{_EXACT}; got {type(model).__name__}")


def _read_timm(model: Any) -> Plan:
    """timm's names, which :class:`khot.models.ViT` shares."""
    pool = getattr(model, "global_pool", getattr(model, "pool", "cls"))  # timm has a method pool
    if pool not in ("cls", "token"):
        raise TypeError(f"{_EXACT}; got a model that pools by {pool!r}")
    if getattr(model, "reg_token", None) is not None or getattr(model, "dist_token", None) is not None:
        raise TypeError(f"{_EXACT}; got registers or a distillation token")
    if getattr(model, "no_embed_class", False):
        raise TypeError(f"{_EXACT}; got a class token without a position")
    _identity(getattr(model.patch_embed, "norm", None), "patch_embed.norm")
    for name in ("norm_pre", "fc_norm", "patch_drop", "head_drop"):
        _identity(getattr(model, name, None), name)
    proj: Any = getattr(model.patch_embed, "proj", None)
    if not isinstance(proj, nn.Conv2d) or proj.kernel_size != proj.stride or proj.kernel_size[0] != proj.kernel_size[1]:
        raise TypeError(f"{_EXACT}; got patches made by {type(proj).__name__}, which are not one linear map of a square patch")
    return Plan(
        patch=Map(proj.weight, proj.bias), patch_size=int(proj.kernel_size[0]), prefix=model.cls_token, positions=model.pos_embed,
        blocks=tuple(_timm_block(block) for block in model.blocks), norm=_norm(model.norm), head=_map(model.head),
    )  # fmt: skip


def _timm_block(block: Any) -> BlockPlan:
    attention, mlp = block.attn, block.mlp
    for owner, names in ((block, ("ls1", "ls2")), (attention, ("q_norm", "k_norm", "norm")), (mlp, ("norm",))):
        for name in names:
            _identity(getattr(owner, name, None), name)
    return BlockPlan(
        norm1=_norm(block.norm1), qkv=_map(attention.qkv), proj=_map(attention.proj), norm2=_norm(block.norm2),
        fc1=_map(mlp.fc1), fc2=_map(mlp.fc2), activation=_activation(mlp.act), num_heads=attention.num_heads,
    )  # fmt: skip


def _read_transformers(model: Any) -> Plan:
    vit, embeddings = model.vit, model.vit.embeddings
    proj = embeddings.patch_embeddings.projection
    layers = vit.layers if hasattr(vit, "layers") else vit.encoder.layer
    return Plan(
        patch=Map(proj.weight, proj.bias), patch_size=int(proj.kernel_size[0]), prefix=embeddings.cls_token,
        positions=embeddings.position_embeddings, blocks=tuple(_transformers_block(layer, model.config) for layer in layers),
        norm=_norm(vit.layernorm), head=_map(model.classifier),
    )  # fmt: skip


def _transformers_block(layer: Any, config: Any) -> BlockPlan:
    found = dict(layer.named_modules())
    maps = {name.rsplit(".", 1)[-1] if not name.endswith("dense") else name: module for name, module in found.items()}
    try:
        parts = [_map(_first(found, key)) for key in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))]
        proj = _map(_first(found, ("attention.output.dense", "attention.o_proj", "attention.attention.o_proj")))
        fc1, fc2 = _map(_first(found, ("intermediate.dense", "mlp.fc1"))), _map(_first(found, ("output.dense", "mlp.fc2"), top=True))
    except KeyError as missing:
        raise TypeError(f"{_EXACT}; {type(layer).__name__} has no {missing} (it has {', '.join(sorted(maps))})") from None
    bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts if p.bias is not None])
    return BlockPlan(
        norm1=_norm(layer.layernorm_before), qkv=Map(torch.cat([p.weight for p in parts]), bias), proj=proj,
        norm2=_norm(layer.layernorm_after), fc1=fc1, fc2=fc2, activation=_named(config.hidden_act), num_heads=config.num_attention_heads,
    )  # fmt: skip


def _first(found: dict[str, nn.Module], names: tuple[str, ...], *, top: bool = False) -> nn.Module:
    """The first linear module whose path ends like one of these names, or is one of them."""
    for name in names:
        for path, module in found.items():
            if isinstance(module, nn.Linear) and (path == name or not top and (path.endswith("." + name) or path == name)):
                return module
    raise KeyError(" or ".join(names))


def _identity(module: nn.Module | None, name: str) -> None:
    if module is not None and not isinstance(module, (nn.Identity, nn.Dropout)):
        raise TypeError(f"{_EXACT}; got {name} = {type(module).__name__}")


def _norm(module: Any) -> Norm:
    if not isinstance(module, nn.LayerNorm):
        raise TypeError(f"{_EXACT}; got {type(module).__name__} where a LayerNorm should be")
    return Norm(module.weight, module.bias, module.eps)


def _map(module: Any) -> Map:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{_EXACT}; got {type(module).__name__} where a Linear should be")
    return Map(module.weight, module.bias)


def _activation(module: nn.Module) -> str:
    if isinstance(module, nn.ReLU):
        return "relu"
    if isinstance(module, _GELU) and getattr(module, "approximate", "none") == "none":
        return "gelu"
    raise TypeError(f"{_EXACT}; got the activation {type(module).__name__}")


def _named(activation: str) -> str:
    if activation not in ("gelu", "relu"):
        raise TypeError(f"{_EXACT}; got the activation {activation!r}")
    return activation
