"""Brewer's draw-by-draw design."""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from khot._tensors import in_transform, is_bare, is_recorded, readable, wide_dtype
from khot.primitives.draw import refuse_generator
from khot.primitives.operators import define
from khot.registry import design

_PERIOD = 32  # attempts between two looks at all items


@design("brewer", cost="O(nk)", paper="Brewer 1975; Tille 2006", exact=True)
def brewer(probs: Tensor, k: Tensor, *, generator: Generator | None = None) -> Tensor:
    r"""Items are drawn one at a time without replacement, with weights that keep the inclusion probabilities.

    .. math:: w_i = \frac{\pi_i (c - \pi_i)}{c - \pi_i m}, \quad c = \text{what is left of } k, \ m = \text{draws left}

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> brewer(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    if is_recorded() and not in_transform():  # one operator: a compiler must not unroll the draws
        refuse_generator(generator)
        return torch.ops.khot.brewer(probs, k)
    return _draw(probs, k, generator)


class _Urn(NamedTuple):
    """What is left of each row, in blocks, and the weights as they were when they were last computed for all items."""

    p: Tensor  # (..., blocks, width), 0 for items already drawn
    sums: Tensor  # (..., blocks), of p
    rest: Tensor  # (..., 1), the sum of everything
    draws: Tensor  # (..., 1), how many are left
    seen: Tensor  # (..., 1), rest / draws at that time
    shares: Tensor  # (..., blocks), the sums of p / (seen - p)


def _draw(probs: Tensor, k: Tensor, generator: Generator | None = None) -> Tensor:
    n, certain = probs.shape[-1], probs >= 1
    width = math.isqrt(max(n, 1))
    free = torch.where(certain, 0.0, probs.to(wide_dtype(probs)))
    p = pad(free, (0, -n % width)).unflatten(-1, (-1, width))
    rest, draws = free.sum(-1, keepdim=True), k - certain.sum(-1, keepdim=True)
    urn = _Urn(p, p.sum(-1), rest, draws, rest, p.sum(-1))
    fixed = not readable(draws)  # then how often it is drawn may not depend on what is drawn, and nothing may be rejected
    for i in range(n) if fixed else itertools.count():
        if fixed or i % _PERIOD == 0:
            if not fixed and not bool((urn.draws > 0).any()):
                break
            seen = urn.rest / urn.draws.clamp(min=1)
            urn = urn._replace(seen=seen, shares=_share(urn.p, seen.unsqueeze(-1)).sum(-1))
        u = torch.rand((3, *probs.shape[:-1], 1), dtype=p.dtype, device=p.device, generator=generator)
        urn = _step(urn, u)
    left = urn.p.flatten(-2)[..., :n]
    return (certain | (free > 0) & (left == 0)).to(probs.dtype)


def _step(urn: _Urn, u: Tensor) -> _Urn:
    """One attempt to draw an item: the block, the item in it, and whether it is kept.

    The old weights are never smaller than the new ones, as :math:`c / m` grows from draw to draw. So an item is proposed by the old
    ones, of which all but one block stay as they are, and kept with the ratio of the new to the old.
    """
    mean = urn.rest / urn.draws.clamp(min=1)
    gap = urn.rest - mean
    block = _first_beyond(urn.sums + gap * urn.shares, u[0])
    whole = block.unsqueeze(-1).expand(*block.shape, urn.p.shape[-1])
    items = urn.p.gather(-2, whole).squeeze(-2)
    old = items + gap * _share(items, urn.seen)
    place = _first_beyond(old, u[1])
    item, proposed = items.gather(-1, place), old.gather(-1, place)
    live = (urn.draws > 0) & (item > 0) & (u[2] * proposed < brewer_weights(item, urn.rest, urn.draws))
    items = torch.where(live, items.scatter(-1, place, 0.0), items)
    return urn._replace(
        p=_put(urn.p, -2, whole, items.unsqueeze(-2)),
        sums=_put(urn.sums, -1, block, items.sum(-1, keepdim=True)),
        shares=_put(urn.shares, -1, block, _share(items, urn.seen).sum(-1, keepdim=True)),
        rest=urn.rest - torch.where(live, item, 0.0),
        draws=urn.draws - live.to(urn.draws.dtype),
    )


def brewer_weights(p: Tensor, rest: Tensor, draws: Tensor) -> Tensor:
    """The odds of the next draw; ``p`` is 0 for items already drawn, ``rest`` its sum, ``draws`` how many are left.

    The formula of :func:`brewer` times ``m``, with :math:`(c - p) / (c/m - p) = 1 + (c - c/m) / (c/m - p)`: all terms positive.
    """
    mean = rest / draws.clamp(min=1)
    return p + (rest - mean) * _share(p, mean)


def _share(p: Tensor, mean: Tensor) -> Tensor:
    # c / m is 1 at first and grows: what is left of the difference for p < 1 is half a rounding at least.
    return p / (mean - p).clamp(min=torch.finfo(p.dtype).eps / 4)


def _first_beyond(weight: Tensor, u: Tensor) -> Tensor:
    """The first place where the cumulative weight passes the share ``u`` of the total, ``(..., 1)``; its weight is positive."""
    cumulative = weight.cumsum(-1)
    aim = cumulative[..., -1:] * u.clamp(max=1 - 4 * torch.finfo(u.dtype).eps)
    return (cumulative <= aim).sum(-1, keepdim=True).clamp(max=weight.shape[-1] - 1)


def _put(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """In place where that is allowed: inside a transform the index may be batched and the tensor not."""
    return x.scatter_(dim, index, value) if is_bare(x) and is_bare(index) else x.scatter(dim, index, value)


def _fake(probs: Tensor, k: Tensor) -> Tensor:
    return torch.empty_like(probs, memory_format=torch.contiguous_format)


define("brewer(Tensor probs, Tensor k) -> Tensor", _draw, _fake, random=True)
