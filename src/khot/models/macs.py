from __future__ import annotations

import copy

import torch
from torch import nn


def count_macs(model: nn.Module, *shape: int) -> int:
    """Multiply-accumulate operations of one forward pass in evaluation, of matrix products, convolutions and attention.

    The pass runs on the meta device, without memory and without values: on CPU the counter of torch misses fused attention.

    Args:
        model: left as it is; a copy is counted.
        shape: of the input, ``1, 3, 224, 224`` if none is given.

    Example:
        >>> from khot.models import ViT
        >>> round(count_macs(ViT(dim=384, num_heads=6)) / 1e9, 1)  # DeiT-S
        4.6
    """
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton

    on_meta = copy.deepcopy(model).to("meta").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        on_meta(torch.empty(shape or (1, 3, 224, 224), device="meta"))
    return counter.get_total_flops() // 2
