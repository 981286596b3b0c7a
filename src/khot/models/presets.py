"""Models by name, in two sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from khot.checks import find
from khot.models.topk import Mixer, TopKAttentionModel, TopKDynamicModel, TopKModel
from khot.models.vit import ViT

MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "vit": ViT,
        "topk_dynamic": TopKDynamicModel,
        "topk_attention": TopKAttentionModel,
        "topk_attention_none": partial(TopKAttentionModel, mix="none"),
        "topk_attention_attend": partial(TopKAttentionModel, mix="attend"),
        "topk": TopKModel,
        "mixer": Mixer,
    }
)

# For CPUs and images of 28 x 28 or 32 x 32; the controls are sized to the parameters of topk_dynamic.
_TINY: dict[str, Any] = {"image_size": 28, "patch_size": 4, "in_channels": 1, "num_classes": 10, "dim": 96, "depth": 6}
_TINY_TOPK = _TINY | {"k": 24, "head_ratio": 2.0}
# The published sizes of the TopK networks and controls of the same size, for ImageNet.
_BASE: dict[str, Any] = {"image_size": 224, "patch_size": 16, "in_channels": 3, "num_classes": 1000, "dim": 128, "depth": 12}
_BASE_TOPK = _BASE | {"k": 96}

PRESETS: Mapping[str, Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "tiny": {
            "vit": _TINY | {"num_heads": 3, "mlp_ratio": 4.5},
            "mixer": _TINY | {"head_ratio": 2.0, "tokens_hidden": 432},
            **{name: _TINY_TOPK for name in MODELS if name.startswith("topk")},
        },
        "base": {
            "vit": _BASE | {"dim": 160, "num_heads": 5},
            "mixer": _BASE,
            **{name: _BASE_TOPK for name in MODELS if name.startswith("topk")},
        },
    }
)


SIZES = {"image_size", "patch_size", "in_channels", "num_classes", "dim", "depth", "num_heads", "tokens_hidden"}


def create_model(name: str, *, preset: str = "base", **overrides: Any) -> nn.Module:
    """A model of :data:`khot.models.MODELS` in the size of a preset; any argument of the model overrides the preset's.

    Args:
        name: ``"vit"``, ``"topk_dynamic"``, ``"topk_attention"``, ``"topk_attention_none"``, ``"topk_attention_attend"``,
            ``"topk"`` or ``"mixer"``.
        preset: ``"tiny"`` (28 x 28, 49 tokens, dim 96, depth 6) or ``"base"`` (224 x 224, 196 tokens, dim 128, depth 12).

    Example:
        >>> model = create_model("topk_dynamic", preset="tiny", in_channels=3, image_size=32)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    sizes = find(PRESETS, preset, "preset")
    model = find(MODELS, name, "model")
    for size in SIZES & overrides.keys():
        value = overrides[size]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{size} must be a whole number of at least 1, got {value!r}")
    return model(**(sizes[name] | overrides))


def count_parameters(model: nn.Module) -> int:
    """How many numbers are learned.

    Example:
        >>> count_parameters(create_model("topk_dynamic"))
        4186480
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
