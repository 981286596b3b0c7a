"""The pivotal method as a balanced tree of duels."""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from khot._tensors import source
from khot.designs._common import random_order
from khot.primitives.draw import draw
from khot.primitives.fixed_point import fixed_point
from khot.registry import design

Settled: TypeAlias = tuple[Tensor, Tensor]  # places, and whether they are taken


@design(
    "pivotal",
    cost="O(n), log2(n) rounds",
    paper="Deville and Tille 1998; Chauvet 2012 (random order)",
    exact=True,
    draw_soft=functools.partial(draw, "pivotal"),
)
def pivotal(probs: Tensor, k: Tensor, *, generator: Generator | None = None, order: str = "random") -> Tensor:
    r"""Pairs of items fight: one is settled at 0 or 1, the other carries what is left of their sum into the next round.

    With :math:`a + b \le 1` the winner carries :math:`a + b` and the loser is out; otherwise the winner is in and the loser carries
    :math:`a + b - 1`. The odds leave every expectation as it was. In integers, so that the last one left carries exactly 0 or 1.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.
        order: ``"random"`` shuffles every row first; ``"fixed"`` keeps neighbours apart (the first rounds pair neighbours).

    Returns:
        0/1 like ``probs``.

    Example:
        >>> pivotal(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    drawn = draw("pivotal", probs, k, generator=generator, order=order)
    if drawn is not None:
        return drawn
    place = (
        random_order(probs, generator)
        if order == "random"
        else torch.arange(probs.shape[-1], dtype=torch.long, device=probs.device).expand(probs.shape)
    )
    value, bits = fixed_point(probs.gather(-1, place), k)
    settled: list[Settled] = []
    while value.shape[-1] > 1:
        value, place = _round(value, place, settled, 1 << bits, generator)
    places, taken = zip(*settled, (place, value > 0), strict=True)
    return torch.zeros_like(probs).scatter(-1, torch.cat(places, -1), torch.cat(taken, -1).to(probs.dtype))


def _round(
    value: Tensor, place: Tensor, settled: list[tuple[Tensor, Tensor]], one: int, generator: Generator | None
) -> tuple[Tensor, Tensor]:
    """One round of duels between neighbours; settled items are noted with what became of them, an odd one goes through."""
    paired = value.shape[-1] // 2 * 2
    a, b = value[..., 0:paired:2], value[..., 1:paired:2]
    total = a + b
    over = total > one
    # Odds of a: a to b for staying in, (1 - b) to (1 - a) for being the one taken.
    weight, against = torch.where(over, one - b, a), torch.where(over, 2 * one - total, total)
    u = torch.rand(a.shape, dtype=torch.float64 if a.device.type != "mps" else torch.float32, device=a.device, **source(generator))
    # Kept from rounding up to the whole: a certain winner wins, always.
    a_wins = u.clamp_(max=1 - torch.finfo(u.dtype).eps).mul(against) < weight
    a_settles = a_wins == over  # the winner settles when it is taken, the loser when it is dropped
    place_a, place_b = place[..., 0:paired:2], place[..., 1:paired:2]
    settled.append((torch.where(a_settles, place_a, place_b), over))
    left, place_left = total - one * over, torch.where(a_settles, place_b, place_a)
    return torch.cat((left, value[..., paired:]), -1), torch.cat((place_left, place[..., paired:]), -1)
