"""Exact samples of k-subsets, drawn from the root of the tree of counts down to its leaves."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot.primitives.poisson_binomial import fewer, halves, largest, levels_of, tilt
from khot.primitives.polynomial import raw_product


@torch.no_grad()
def draw_subsets(logits: Tensor, k: Tensor, num_samples: int, generator: Generator | None = None) -> Tensor:
    """Exact samples of k-subsets with weights ``exp`` of the sum of their logits.

    From the root of the tree down, a node's heads are divided between its halves; log2(n) rounds for the whole batch.

    Args:
        logits: ``(..., n)``.
        k: ``(..., 1)`` whole numbers.
        num_samples: how many for each row.

    Returns:
        0/1 of shape ``(num_samples, ..., n)``, dtype of ``logits``.

    Example:
        >>> draw_subsets(torch.tensor([0.0, 1.0, -torch.inf]), torch.tensor([2]), 2)
        tensor([[1., 1., 0.],
                [1., 1., 0.]])
    """
    n, rows = logits.shape[-1], logits.shape[:-1].numel()
    with torch.inference_mode():  # a tenth faster than no_grad; nothing of it leaves but the places
        chosen, many = _places(logits, k, num_samples, generator)
    out = torch.zeros(num_samples * rows * n, dtype=logits.dtype, device=logits.device)
    out[chosen] = 1.0
    out = out.view(num_samples, rows, n)
    if bool(many.any()):
        out = torch.where(many.unsqueeze(-1), 1 - out, out)
    return out.reshape(num_samples, *logits.shape)


def _places(logits: Tensor, k: Tensor, num_samples: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Where heads fall in a flat ``(S, R, n)``, and for which rows heads stand for the items left out."""
    coins = tilt(logits, k)
    leaves, few, many = fewer(coins.tails_heads, coins.k)
    size, (_, n, rows) = largest(few), leaves.shape
    levels = levels_of(leaves, size, 2, raw_product) if n > 1 else []
    heads = few.expand(1, num_samples, -1)  # (nodes, S, R)
    while levels and heads.shape[0] <= size:
        heads = _split(levels.pop(), heads, generator)
    node, sample, row = heads.nonzero(as_tuple=True)  # from here on most nodes have nothing left to divide
    column, sample = _walk(levels, node * rows + row, sample, heads[node, sample, row], generator)
    return (sample * rows + column % rows) * n + column // rows, many


def _split(children: Tensor, heads: Tensor, generator: Generator | None) -> Tensor:
    """Divide each node's heads, ``(nodes, S, R)``, between its halves."""
    left, right = halves(children)
    shape = (-1, -1, heads.shape[1], -1)
    first = _share(left.unsqueeze(2).expand(shape), right.unsqueeze(2).expand(shape), heads, generator)
    return torch.cat((first, heads - first))[: children.shape[1]]


def _walk(levels: list[Tensor], column: Tensor, sample: Tensor, heads: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """The same for a list of nodes with heads, each a column ``node * R + row`` of its level and a sample; at the end, leaves."""
    while levels:
        left, right = (half.flatten(1) for half in halves(levels.pop()))
        place = column.expand(left.shape[0], -1)
        first = _share(left.gather(1, place), right.gather(1, place), heads, generator)
        heads = torch.cat((first, heads - first))
        some = heads.nonzero().squeeze(-1)
        column = torch.cat((column, column + left.shape[1])).index_select(0, some)
        sample, heads = torch.cat((sample, sample)).index_select(0, some), heads.index_select(0, some)
    return column, sample


def _share(left: Tensor, right: Tensor, heads: Tensor, generator: Generator | None) -> Tensor:
    """How many go to the left: j with probability in proportion to ``left_j right_{heads - j}``."""
    top = min(left.shape[0] - 1, largest(heads))
    left, right = left[: top + 1], right[: top + 1]
    others = heads - torch.arange(top + 1, dtype=torch.long, device=heads.device).view(-1, *[1] * heads.ndim)  # (top + 1, ...)
    inside = others.clamp(0, top)
    weight = right.gather(0, inside).mul_(left).mul_(inside == others)
    cumulative = weight.cumsum(0)
    u = torch.rand(heads.shape, dtype=weight.dtype, device=heads.device, generator=generator)
    # Below the total even after rounding, so that the chosen j has a positive weight.
    threshold = cumulative[-1] * u.clamp_(max=1 - 4 * torch.finfo(u.dtype).eps)
    return (cumulative <= threshold).to(weight.dtype).sum(0).long().clamp_(max=top)  # summing booleans is slow
