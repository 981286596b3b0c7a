"""Every operation of the two domains beside the plain function it bounds, and perturbations to try them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from khot import bounds
from khot.bounds import Affine, Box

WIDE = torch.float64


W, V = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3, torch.randn(8, generator=torch.Generator().manual_seed(2))
KERNEL = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(3))


def line(t: Tensor) -> Tensor:
    return t @ W.to(WIDE).mT + V.to(WIDE)


def gelu(t: Tensor) -> Tensor:
    """With the digits of its lower tail, which ``F.gelu`` loses."""
    return 0.5 * t * torch.erfc(-t * 0.5**0.5)


def of_line(op: Callable[..., object]) -> Callable[..., object]:
    return lambda x: op(bounds.linear(x, W, V))


# name: (on bounds, on tensors, shape of the input)
OPERATIONS = {
    "linear": (lambda x: bounds.linear(x, W, V), line, (5, 8)),
    "relu": (of_line(bounds.relu), lambda t: line(t).relu(), (5, 8)),
    "gelu": (of_line(bounds.gelu), lambda t: gelu(line(t)), (5, 8)),
    "wide gelu": (lambda x: bounds.gelu(x.scale(torch.full((1, 1, 1), 5.0, dtype=WIDE))), lambda t: gelu(5 * t), (5, 8)),
    "exp": (of_line(bounds.exp), lambda t: line(t).exp(), (5, 8)),
    "reciprocal": (lambda x: bounds.reciprocal(bounds.exp(x)), lambda t: (-t).exp(), (5, 8)),
    "rsqrt": (lambda x: bounds.rsqrt(bounds.exp(x)), lambda t: (-t / 2).exp(), (5, 8)),
    "square": (lambda x: bounds.linear(x, W, V).square(), lambda t: line(t).square(), (5, 8)),
    "product": (lambda x: x.bilinear(bounds.linear(x, W, V), torch.mul), lambda t: t * line(t), (5, 8)),
    "matrix product": (lambda x: bounds.matmul(x, x.linear(lambda t: t.mT)), lambda t: t @ t.mT, (5, 8)),
    "softmax": (of_line(bounds.softmax), lambda t: line(t).softmax(-1), (5, 8)),
    "layer norm": (lambda x: bounds.layer_norm(x, V, V, 1e-5), lambda t: F.layer_norm(t, (8,), V.to(WIDE), V.to(WIDE), 1e-5), (5, 8)),
    "attention": (
        lambda x: bounds.attend(bounds.softmax(bounds.matmul(x, x.linear(lambda t: t.mT))), x),
        lambda t: (t @ t.mT).softmax(-1) @ t,
        (5, 8),
    ),
    "patches": (lambda x: bounds.patches(x, KERNEL, None, 4), lambda t: F.conv2d(t, KERNEL.to(WIDE), stride=4).flatten(2).mT, (2, 8, 12)),
    "concat": (lambda x: bounds.cat([x, bounds.linear(x, W, V)], -2), lambda t: torch.cat([t, line(t)], -2), (5, 8)),
    "gather": (lambda x: bounds.gather(x, torch.tensor([[3, 0]])), lambda t: t[:, [3, 0]], (5, 8)),
    "sum": (lambda x: x.linear(lambda t: t.sum(-1), terms=8), lambda t: t.sum(-1), (5, 8)),
    "kth best": (lambda x: bounds.kth_best(x, x.linear(lambda t: t[..., 0]), 3), lambda t: best(t, t[..., 0], 3), (6, 8)),
}


def best(t: Tensor, scores: Tensor, k: int) -> Tensor:
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return t.gather(1, order.unsqueeze(-1).expand(-1, -1, t.shape[-1]))


def perturbed(x: Tensor, eps: float, count: int) -> Tensor:
    """Half corners of the box, half points inside it."""
    corners = torch.randint(0, 2, (count // 2, *x.shape[1:])).to(WIDE) * 2 - 1
    inside = torch.rand(count - count // 2, *x.shape[1:], dtype=WIDE) * 2 - 1
    return x.to(WIDE) + eps * torch.cat([corners, inside])


def violations(values: Tensor, bound: Box | Affine) -> int:
    return int(((values < bound.lower) | (values > bound.upper)).sum())
