"""Successive halving: a tournament of soft duels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot.primitives.collect import collect
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order, sort_descending
from khot.registry import Number, column, relaxation
from khot.relaxations._rows import ordinary

BASE = 20.0  # of the published power boost
_SMALL = 1 << 12  # entries up to which the matrix is cheaper than its bags


class _Round(NamedTuple):
    """One round, from the best seed to the worst: who sat there, and what it weighs in its pair."""

    order: Tensor  # (..., 2m); where the best have a bye, they fill the last places too,
    share: Tensor  # (..., 2m); with weight 0


def num_rounds(n: int, k: int) -> int:
    """The least ``r`` with ``k 2^r >= n``."""
    return (-(-n // k) - 1).bit_length()


def _play(scores: Tensor, k: int, tau: Number, boost: float, mode: str, duel: Callable[..., tuple[Tensor, Tensor]]) -> list[_Round]:
    """All rounds of the tournament, on the scores alone; byes make the number after the first round k times a power of two."""
    values, played = scores, []
    byes = k * 2 ** num_rounds(scores.shape[-1], k) - scores.shape[-1] if k else 0
    while values.shape[-1] > k > 0:
        ordered, order = sort_descending(values, sorted_nearly=bool(played))
        share, after = duel(ordered[..., byes:] if byes else ordered, tau, boost, mode)
        if byes:
            order, share = torch.cat([order, order[..., :byes].flip(-1)], -1), pad(pad(share, (byes, 0), value=1.0), (0, byes))
            after, byes = torch.cat([ordered[..., :byes], after], -1), 0
        played.append(_Round(order, share))
        values = after
    return played


def _duel(seeds: Tensor, tau: Number, boost: float, mode: str) -> tuple[Tensor, Tensor]:
    """The boosted softmax of the best with the worst, the second with the last but one, ..., and the scores that go on."""
    rivals = seeds.flip(-1)
    boosted = (seeds - rivals) * (boost / tau) if mode == "softmax" else BASE ** (seeds / tau) - BASE ** (rivals / tau)
    share, half = torch.sigmoid(boosted), seeds.shape[-1] // 2
    return share, torch.lerp(rivals[..., :half], seeds[..., :half], share[..., :half])


def _guarded_duel(seeds: Tensor, tau: Number, boost: float, mode: str) -> tuple[Tensor, Tensor]:
    """The same where scores may be infinite: -inf weighs 0, two at +inf weigh the same."""
    rivals, half = seeds.flip(-1), seeds.shape[-1] // 2
    real = seeds.isfinite() & rivals.isfinite()
    share, after = _duel(torch.where(real, seeds, 0.0), tau, boost, mode)
    certain = torch.where(seeds == rivals, 0.5 * (seeds == torch.inf), (seeds > rivals).to(seeds.dtype))
    return torch.where(real, share, certain), torch.where(real[..., :half], after, seeds[..., :half])


class _Bags(NamedTuple):
    """What comes out in each place: items and their weights, both ``(..., k, 2^rounds)``; byes fill up with weight 0."""

    items: Tensor
    weight: Tensor


def _bags(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> _Bags:
    """Trace every place from the last round back to the first, O(n) in all."""
    _check(boost, mode)
    finite = ordinary(scores)
    played = _play(scores, k, column(tau, scores), boost, mode, _duel if finite else _guarded_duel)
    if not played:
        items, weight = descending_order(scores)[..., :k].unsqueeze(-1), torch.ones_like(scores[..., :k]).unsqueeze(-1)
    else:
        slots = torch.arange(k, device=scores.device).expand(*scores.shape[:-1], k).unsqueeze(-1)
        items, weight = _unwind(played, slots)
    if finite:
        return _Bags(items, weight)
    there = scores.detach().gather(-1, items.flatten(-2)).unflatten(-1, items.shape[-2:]) > -torch.inf
    return _Bags(items, torch.where(there, weight, 0.0).masked_fill(scores.isnan().any(-1)[..., None, None], torch.nan))


def _unwind(played: list[_Round], slots: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.ones_like(slots, dtype=played[0].share.dtype)
    for order, share in reversed(played):
        pair = torch.stack([slots, order.shape[-1] - 1 - slots], -1).flatten(-3)
        parts = share.gather(-1, pair).unflatten(-1, (*slots.shape[-2:], 2)) * weight.unsqueeze(-1)
        slots, weight = order.gather(-1, pair).unflatten(-1, (slots.shape[-2], 2 * slots.shape[-1])), parts.flatten(-2)
    return slots, weight


def _check(boost: float, mode: str) -> None:
    if not boost > 0:
        raise ValueError(f"boost must be positive, got {boost}; the larger, the harder each duel")
    if mode not in ("softmax", "power"):
        raise ValueError(f"mode must be 'softmax' or 'power', got {mode!r}")


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    items, weight = _bags(scores, k, tau, boost, mode)
    return torch.zeros_like(scores).scatter_add(-1, items.flatten(-2), weight.flatten(-2))


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    if k * scores.shape[-1] <= _SMALL:
        return _matrix(scores, k, tau, boost, mode) @ x
    items, weight = _bags(scores, k, tau, boost, mode)
    return collect(x, weight, items) if k else x[..., :0, :]


def _matrix(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> Tensor:
    items, weight = _bags(scores, k, tau, boost, mode)
    out = torch.zeros(*scores.shape[:-1], k, scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return out.scatter_add(-1, items, weight)


@relaxation(
    "halving",
    kind="matrix",
    cost="O(n log n); matrix O(nk)",
    paper="Pietruszka, Borchmann, Gralinski 2020",
    mask=_mask,
    select=_select,
    smooth=False,
    monotone=False,
    ties_equal=False,
    infinite=False,
)
def halving_matrix(scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    r"""Successive halving: in each round the best meets the worst, and each pair goes on as one.

    .. math:: w = \mathrm{softmax}(C v_i / \tau, C v_j / \tau), \quad v' = w_1 v_i + w_2 v_j, \quad E' = w_1 E_i + w_2 E_j

    over :math:`\lceil \log_2 (n/k) \rceil` rounds. Where n is not k times a power of two, the best seeds have a bye in the first.
    Every item ends in one row, so that the mask is that item's weight and a selection costs O(nd). The seeding is taken as constant:
    the gradient is that of the weights. More than k items at +inf meet as equals, and so do not weigh the same in the end.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.
        boost: the constant C.
        mode: ``"softmax"``, or ``"power"`` for the published code's softmax over ``20 ** (v / tau)``, which ignores ``boost``, is
            not invariant to a shift of the scores, and overflows float32 from ``v / tau = 30`` on.

    Returns:
        ``(..., k, n)``, rows that sum to 1, one entry in each column.

    Example:
        >>> halving_matrix(torch.tensor([0.1, 0.9, 0.5, 0.6]), k=2, boost=5.0)
        tensor([[0.0180, 0.9820, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.3775, 0.6225]])
    """
    check_size("halving", *scores.shape[:-1], k, scores.shape[-1], fix="soft_topk and select_topk need no matrix")
    return _matrix(scores, k, tau, boost, mode)
