"""Systematic sampling."""

from __future__ import annotations

import functools

import torch
from torch import Generator, Tensor

from khot._tensors import source
from khot.designs._common import random_order
from khot.primitives.draw import draw
from khot.primitives.fixed_point import fixed_point
from khot.registry import design


@design(
    "systematic",
    cost="O(n)",
    paper="Madow 1949; Hartley and Rao 1962 (random order)",
    exact=True,
    positive_joint=False,
    note="in fixed order most pairs never meet",
    draw_soft=functools.partial(draw, "systematic"),
)
def systematic(probs: Tensor, k: Tensor, *, generator: Generator | None = None, order: str = "random") -> Tensor:
    r"""One random number, and a comb of teeth one apart on the cumulative probabilities.

    .. math:: z_i = \lfloor C_i + u \rfloor - \lfloor C_{i-1} + u \rfloor, \quad C_i = \textstyle\sum_{j \le i} \pi_j, \ u \sim U(0, 1)

    in integers, so that every row has exactly ``k`` ones.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.
        order: ``"random"`` shuffles every row first, which spreads the joint probabilities; ``"fixed"`` keeps neighbours apart.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> probs, k = torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])
        >>> systematic(probs, k).sum()
        tensor(2.)
    """
    drawn = draw("systematic", probs, k, generator=generator, order=order)
    if drawn is not None:
        return drawn
    if order == "fixed":
        return _teeth(probs, k, generator)
    place = random_order(probs, generator)
    return torch.zeros_like(probs).scatter(-1, place, _teeth(probs.gather(-1, place), k, generator))


def _teeth(probs: Tensor, k: Tensor, generator: Generator | None) -> Tensor:
    units, bits = fixed_point(probs, k)
    start = torch.randint(1 << bits, (*probs.shape[:-1], 1), dtype=torch.long, device=probs.device, **source(generator))
    passed = (units.cumsum_(-1) + start).bitwise_right_shift_(bits)
    return torch.cat((passed[..., :1] > 0, passed[..., 1:] != passed[..., :-1]), -1).to(probs.dtype)
