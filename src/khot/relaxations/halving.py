"""Successive halving: a tournament of soft duels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot.primitives.limits import check_size
from khot.registry import Number, column, relaxation

BASE = 20.0  # of the published power boost


class _Round(NamedTuple):
    """One round: who sat where before it, and what the better and the worse of each pair weigh in what comes out."""

    order: Tensor  # (..., 2m), from the best seed to the worst
    better: Tensor  # (..., m)
    worse: Tensor  # (..., m); the i-th of them is the i-th seed from the end


def num_rounds(n: int, k: int) -> int:
    """The least ``r`` with ``k 2^r >= n``."""
    return (-(-n // k) - 1).bit_length()


def _weights(high: Tensor, low: Tensor, gap: Tensor, tau: Number, boost: float, mode: str) -> tuple[Tensor, Tensor]:
    """The boosted softmax of every pair; an item at -inf weighs 0, two at +inf weigh the same."""
    if mode == "softmax":
        boosted = gap * (boost / tau)
    else:
        boosted = BASE ** ((low + gap) / tau) - BASE ** (low / tau)
    both_certain = low == torch.inf
    duel = high.isfinite() & low.isfinite()
    worse = torch.where(duel, torch.sigmoid(-boosted), 0.5 * both_certain)
    better = torch.where(duel, torch.sigmoid(boosted), torch.where(both_certain, 0.5, (high > -torch.inf).to(high.dtype)))
    return better, worse


def _play(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> list[_Round]:
    """All rounds of the tournament, on the scores alone."""
    n, played = scores.shape[-1], []
    values = torch.nn.functional.pad(scores, (0, k * 2 ** num_rounds(n, k) - n), value=-torch.inf)
    while values.shape[-1] > k:
        order = values.detach().sort(dim=-1, descending=True, stable=True).indices
        high, low = values.gather(-1, order).chunk(2, -1)
        low = low.flip(-1)
        duel = high.isfinite() & low.isfinite()
        gap = torch.where(duel, high, 0.0) - torch.where(duel, low, 0.0)
        better, worse = _weights(high, torch.where(duel, low, low.detach()), gap, tau, boost, mode)
        played.append(_Round(order, better, worse))
        values = high - worse * gap
    return played


def _trace(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> tuple[Tensor, Tensor]:
    """Where each item ends and with what weight, both ``(..., n)``: from the last round back to the first, O(n) in all."""
    _check(boost, mode)
    n = scores.shape[-1]
    place = torch.arange(k, device=scores.device).expand(*scores.shape[:-1], k)
    weight = torch.ones_like(scores[..., :k])
    played = _play(scores, k, column(tau, scores), boost, mode) if k else []
    for order, better, worse in reversed(played):
        back = order.argsort(-1)
        weight = torch.cat([weight * better, (weight * worse).flip(-1)], -1).gather(-1, back)
        place = torch.cat([place, place.flip(-1)], -1).gather(-1, back)
    if not played and k:
        order = scores.detach().sort(dim=-1, descending=True, stable=True).indices
        place, weight = order.argsort(-1), (scores.detach() > -torch.inf).to(scores.dtype)
    elif not k:
        place, weight = torch.zeros_like(scores, dtype=torch.long), torch.zeros_like(scores)
    weight = weight[..., :n].masked_fill(scores.isnan().any(-1, keepdim=True), torch.nan)
    return place[..., :n], weight


def _check(boost: float, mode: str) -> None:
    if not boost > 0:
        raise ValueError(f"boost must be positive, got {boost}; the larger, the harder each duel")
    if mode not in ("softmax", "power"):
        raise ValueError(f"mode must be 'softmax' or 'power', got {mode!r}")


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    return _trace(scores, k, tau, boost, mode)[1]


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    place, weight = _trace(scores, k, tau, boost, mode)
    if k == 0:
        return x[..., :0, :]
    out = torch.zeros(*x.shape[:-2], k, x.shape[-1], dtype=x.dtype, device=x.device)
    return out.scatter_add(-2, place.unsqueeze(-1).expand_as(x), weight.unsqueeze(-1) * x)


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
    place, weight = _trace(scores, k, tau, boost, mode)
    out = torch.zeros(*scores.shape[:-1], k, scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return out.scatter(-2, place.unsqueeze(-2), weight.unsqueeze(-2)) if k else out
