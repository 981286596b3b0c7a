"""Exact samples of k-subsets, drawn from the root of the tree of counts down to its leaves."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot._tensors import in_transform, is_recorded
from khot.primitives.draw import refuse_generator
from khot.primitives.operators import define
from khot.primitives.poisson_binomial import halves, levels_of
from khot.primitives.polynomial import product, raw_product
from khot.primitives.tilt import largest, tilt


@torch.no_grad()
def draw_subsets(logits: Tensor, k: Tensor | int, num_samples: int, generator: Generator | None = None) -> Tensor:
    """Exact samples of k-subsets with weights ``exp`` of the sum of their logits.

    From the root of the tree down, a node's heads are divided between its halves; log2(n) rounds for the whole batch.

    Args:
        logits: ``(..., n)``.
        k: a whole number, or ``(..., 1)`` whole numbers.
        num_samples: how many for each row.

    Returns:
        0/1 of shape ``(num_samples, ..., n)``, dtype of ``logits``.

    Example:
        >>> draw_subsets(torch.tensor([0.0, 1.0, -torch.inf]), 2, 2)
        tensor([[1., 1., 0.],
                [1., 1., 0.]])
    """
    logits = logits.detach()
    if in_transform():
        return _by_rounds(logits, k, num_samples, generator)
    if is_recorded():
        refuse_generator(generator)
        sizes = k if isinstance(k, Tensor) else torch.full((1,), k, dtype=torch.long, device=logits.device)
        return torch.ops.khot.draw_subsets(logits, sizes, num_samples)
    return _draw(logits, k, num_samples, generator)


def _draw(logits: Tensor, k: Tensor | int, num_samples: int, generator: Generator | None = None) -> Tensor:
    n, rows = logits.shape[-1], logits.shape[:-1].numel()
    with torch.inference_mode():  # a tenth faster than no_grad; nothing of it leaves but the places
        chosen, many = _places(logits, k, num_samples, generator)
    out = torch.zeros(num_samples * rows * n, dtype=logits.dtype, device=logits.device)
    out[chosen] = 1.0
    out = out.view(num_samples, rows, n)
    if many is not None:
        out = torch.where(many.unsqueeze(-1), 1 - out, out)
    return out.reshape(num_samples, *logits.shape)


def _places(logits: Tensor, k: Tensor | int, num_samples: int, generator: Generator | None) -> tuple[Tensor, Tensor | None]:
    """Where heads fall in a flat ``(S, R, n)``, and for which rows heads stand for the items left out."""
    coins = tilt(logits, k)
    n, rows = coins.log_odds.shape
    levels = levels_of(coins, 2, raw_product) if n > 1 else []
    heads = coins.few.expand(1, num_samples, -1)[: n or 0]  # (nodes, S, R)
    while levels and heads.shape[0] <= coins.size:
        heads = _split(levels.pop(), heads, generator, None)
    node, sample, row = heads.nonzero(as_tuple=True)  # from here on most nodes have nothing left to divide
    column, sample = _walk(levels, node * rows + row, sample, heads[node, sample, row], generator)
    return (sample * rows + column % rows) * n + column // rows, coins.many


def _by_rounds(logits: Tensor, k: Tensor | int, num_samples: int, generator: Generator | None) -> Tensor:
    """The same inside a transform, where no shape may depend on the draws: every node is divided, with heads or without."""
    coins = tilt(logits, k)
    n, rows = coins.log_odds.shape
    levels = levels_of(coins, 2, product) if n > 1 else []
    heads = coins.few.expand(1, num_samples, rows)[: n or 0]
    while levels:
        heads = _split(levels.pop(), heads, generator, coins.size)
    chosen = heads if coins.many is None else torch.where(coins.many, 1 - heads, heads)  # (n, S, R)
    return chosen.permute(1, 2, 0).reshape(num_samples, *logits.shape).to(logits.dtype)


def _split(children: Tensor, heads: Tensor, generator: Generator | None, most: int | None) -> Tensor:
    """Divide each node's heads, ``(nodes, S, R)``, between its halves."""
    left, right = halves(children)
    shape = (-1, -1, heads.shape[1], -1)
    first = _share(left.unsqueeze(2).expand(shape), right.unsqueeze(2).expand(shape), heads, generator, most)
    return torch.cat((first, heads - first))[: children.shape[1]]


def _walk(levels: list[Tensor], column: Tensor, sample: Tensor, heads: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """The same for a list of nodes with heads, each a column ``node * R + row`` of its level and a sample; at the end, leaves."""
    while levels:
        left, right = (half.flatten(1) for half in halves(levels.pop()))
        place = column.expand(left.shape[0], -1)
        first = _share(left.gather(1, place), right.gather(1, place), heads, generator, None)
        heads = torch.cat((first, heads - first))
        some = heads.nonzero().squeeze(-1)
        column = torch.cat((column, column + left.shape[1])).index_select(0, some)
        sample, heads = torch.cat((sample, sample)).index_select(0, some), heads.index_select(0, some)
    return column, sample


def _share(left: Tensor, right: Tensor, heads: Tensor, generator: Generator | None, most: int | None) -> Tensor:
    """How many go to the left: j with probability in proportion to ``left_j right_{heads - j}``.

    Args:
        most: a bound on ``heads``; None looks for it.
    """
    top = min(left.shape[0] - 1, largest(heads, 0) if most is None else most)
    left, right = left[: top + 1], right[: top + 1]
    others = heads - torch.arange(top + 1, dtype=torch.long, device=heads.device).view(-1, *[1] * heads.ndim)  # (top + 1, ...)
    inside = others.clamp(0, top)
    weight = right.gather(0, inside) * left * (inside == others)
    cumulative = weight.cumsum(0)
    u = torch.rand(heads.shape, dtype=weight.dtype, device=heads.device, generator=generator)
    # Below the total even after rounding, so that the chosen j has a positive weight.
    threshold = cumulative[-1] * u.clamp(max=1 - 4 * torch.finfo(u.dtype).eps)
    return (cumulative <= threshold).to(weight.dtype).sum(0).long().clamp(max=top)  # summing booleans is slow


def _fake(logits: Tensor, k: Tensor, num_samples: int) -> Tensor:
    return logits.new_empty((num_samples, *logits.shape))


define("draw_subsets(Tensor logits, Tensor k, SymInt num_samples) -> Tensor", _draw, _fake, random=True)
