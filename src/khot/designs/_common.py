"""What several designs share: random orders, random numbers away from 0 and 1, the k largest as a mask."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot._tensors import readable, source


def uniform(like: Tensor, generator: Generator | None) -> Tensor:
    """Uniform on the open interval (0, 1), so that a logarithm or a logit is finite."""
    u = torch.rand(like.shape, dtype=like.dtype, device=like.device, **source(generator))
    return u.clamp_(torch.finfo(like.dtype).tiny, 1 - torch.finfo(like.dtype).eps / 2)


def random_order(like: Tensor, generator: Generator | None) -> Tensor:
    """A random permutation of ``0 .. n-1`` for every row, ``(..., n)``."""
    if like.numel() == like.shape[-1]:
        return torch.randperm(like.shape[-1], dtype=torch.long, device=like.device, **source(generator)).view(like.shape)
    # Two equal keys keep their order: that leaves the permutation a hair from uniform and the inclusion probabilities exact.
    keys = torch.randint(2**31 - 1, like.shape, dtype=torch.int32, device=like.device, **source(generator))
    return keys.argsort(dim=-1)


def largest(keys: Tensor, k: Tensor) -> Tensor:
    """The 0/1 mask of the ``k`` largest keys of each row, exactly ``k`` of them; equal keys are told apart by place."""
    mask = torch.zeros_like(keys)
    if k.numel() == 0 or keys.shape[-1] == 0:
        return mask
    if not readable(k):
        chosen = torch.arange(keys.shape[-1], dtype=torch.long, device=k.device) < k
        return mask.scatter(-1, keys.argsort(dim=-1, descending=True, stable=True), chosen.to(keys.dtype).expand(keys.shape))
    low, high = (int(bound) for bound in k.aminmax())
    top = keys.topk(high, sorted=low != high).indices
    chosen = torch.arange(high, dtype=torch.long, device=k.device) < k
    return mask.scatter(-1, top, chosen.to(keys.dtype).expand(top.shape))


def logit(probs: Tensor) -> Tensor:
    """``log p - log(1 - p)``, infinite at 0 and 1."""
    return probs.log() - torch.log1p(-probs)
