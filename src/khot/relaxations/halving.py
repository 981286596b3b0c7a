"""Successive halving: a tournament of soft duels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot.primitives.collect import collect
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order
from khot.registry import Number, column, relaxation
from khot.relaxations._rows import ordinary

BASE = 20.0  # of the published power boost


class _Round(NamedTuple):
    """One round: who sat where before it, and what the better and the worse of each pair weigh in what comes out."""

    order: Tensor  # (..., b + 2m), from the best seed to the worst; the b best have a bye
    better: Tensor  # (..., m)
    worse: Tensor  # (..., m); the i-th of them is the i-th seed from the end


def num_rounds(n: int, k: int) -> int:
    """The least ``r`` with ``k 2^r >= n``."""
    return (-(-n // k) - 1).bit_length()


def _play(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> list[_Round]:
    """All rounds of the tournament, on the scores alone; byes make the number after the first round k times a power of two."""
    _check(boost, mode)
    values, played, duel = scores, [], _duel if ordinary(scores) else _guarded_duel
    byes = k * 2 ** num_rounds(scores.shape[-1], k) - scores.shape[-1] if k else 0
    while values.shape[-1] > k > 0:
        # Later rounds are nearly in order already, which a sort by comparison likes.
        order = values.detach().sort(dim=-1, descending=True, stable=True).indices if played else descending_order(values)
        ordered = values.gather(-1, order)
        high, low = ordered[..., byes:].chunk(2, -1)
        better, worse, after = duel(high, low.flip(-1), tau, boost, mode)
        played.append(_Round(order, better, worse))
        values = torch.cat([ordered[..., :byes], after], -1) if byes else after
        byes = 0
    return played


def _duel(high: Tensor, low: Tensor, tau: Number, boost: float, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """The boosted softmax of every pair, and the score with which it goes on."""
    gap = high - low
    boosted = gap * (boost / tau) if mode == "softmax" else BASE ** (high / tau) - BASE ** (low / tau)
    better, worse = torch.sigmoid(boosted), torch.sigmoid(-boosted)
    return better, worse, high - worse * gap


def _guarded_duel(high: Tensor, low: Tensor, tau: Number, boost: float, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same where scores may be infinite: -inf weighs 0, two at +inf weigh the same."""
    real, both_certain = high.isfinite() & low.isfinite(), low == torch.inf
    better, worse, after = _duel(torch.where(real, high, 0.0), torch.where(real, low, 0.0), tau, boost, mode)
    better = torch.where(real, better, torch.where(both_certain, 0.5, (high > -torch.inf).to(high.dtype)))
    return better, torch.where(real, worse, 0.5 * both_certain), torch.where(real, after, high.detach())


class _Bags(NamedTuple):
    """What comes out in each place: items and their weights, both ``(..., k, 2^rounds)``; byes fill up with weight 0."""

    items: Tensor
    weight: Tensor


def _bags(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> _Bags:
    """Trace every place from the last round back to the first, O(n) in all."""
    played = _play(scores, k, column(tau, scores), boost, mode)
    if not played:
        items, weight = descending_order(scores)[..., :k].unsqueeze(-1), torch.ones_like(scores[..., :k]).unsqueeze(-1)
    else:
        slots = torch.arange(k, device=scores.device).expand(*scores.shape[:-1], k).unsqueeze(-1)
        items, weight = _unwind(played, slots)
    if ordinary(scores):
        return _Bags(items, weight)
    there = scores.detach().gather(-1, items.flatten(-2)).unflatten(-1, items.shape[-2:]) > -torch.inf
    return _Bags(items, torch.where(there, weight, 0.0).masked_fill(scores.isnan().any(-1)[..., None, None], torch.nan))


def _unwind(played: list[_Round], slots: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.ones_like(slots, dtype=played[0].better.dtype)
    for order, better, worse in reversed(played):
        last, byes = order.shape[-1] - 1, order.shape[-1] - 2 * better.shape[-1]
        seed = slots.flatten(-2)
        duel = (seed - byes).clamp(min=0)
        wins, losses, partner = better.gather(-1, duel), worse.gather(-1, duel), last - duel
        if byes:
            fights = seed >= byes
            wins, losses, partner = torch.where(fights, wins, 1.0), torch.where(fights, losses, 0.0), torch.where(fights, partner, seed)
        pair = torch.stack([order.gather(-1, seed), order.gather(-1, partner)], -1)
        parts = torch.stack([wins, losses], -1).unflatten(-2, slots.shape[-2:]) * weight.unsqueeze(-1)
        slots, weight = pair.unflatten(-2, slots.shape[-2:]).flatten(-2), parts.flatten(-2)
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
    items, weight = _bags(scores, k, tau, boost, mode)
    return collect(x, weight, items) if k else x[..., :0, :]


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
    the gradient is that of the weights.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.
        boost: the constant C.
        mode: ``"softmax"``, or ``"power"`` for the published code's softmax over ``20 ** (v / tau)``, which ignores ``boost`` and is
            not invariant to a shift of the scores.

    Returns:
        ``(..., k, n)``, rows that sum to 1, one entry in each column.

    Example:
        >>> halving_matrix(torch.tensor([0.1, 0.9, 0.5, 0.6]), k=2, boost=5.0)
        tensor([[0.0180, 0.9820, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.3775, 0.6225]])
    """
    check_size("halving", *scores.shape[:-1], k, scores.shape[-1], fix="soft_topk and select_topk need no matrix")
    items, weight = _bags(scores, k, tau, boost, mode)
    out = torch.zeros(*scores.shape[:-1], k, scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return out.scatter_add(-1, items, weight)
