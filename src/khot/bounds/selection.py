r"""Top-k of bounds: which items are certain, and what is selected, without going through the cases.

Kth-Best by counting is :math:`\sum_i \delta(\mathrm{rank}_i - k)\, x_i` with :math:`\mathrm{rank}_i = 1 + \sum_{j \ne i} h(s_j - s_i)`.
A bound of the scores bounds each difference :math:`s_j - s_i`, and so each step h, which is 0, 1, or lies between two lines
(:func:`khot.linear_bounds.heaviside`). The rank of i then lies between two numbers, by counting and by the lines, whichever is tighter:
the lines are linear forms of the input, and their sum knows that i cannot be behind all of its rivals at once. :math:`\delta` is 0
outside that interval of ranks. So

- an item whose rank is at most k everywhere is kept, one whose rank is above k everywhere is dropped, exactly as they are;
- of the others, exactly ``k - kept`` are selected. As an unordered set they go on as items that *may* take part: the attention of the
  next block sums over them with their number known (:func:`khot.bounds.layers.softmax`). As a sorted place, the selected item is one
  of those whose ranks reach that place: the convex hull of their linear forms.

Either costs one pass, where the cases would be ``undecided`` choose ``k - kept`` passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Generic, NamedTuple, cast

import torch
from torch import Tensor

from khot.bounds._rounding import WORK, room
from khot.bounds.affine import Affine, affine
from khot.bounds.box import Box
from khot.bounds.domain import Bound, Domain
from khot.bounds.layers import gather
from khot.linear_bounds import Lines, heaviside

MOST_UNDECIDED = 12


class Ranks(NamedTuple):
    """The rank of every item lies between ``lower`` and ``upper``, both ``(B, N)``; 1 is the largest score."""

    lower: Tensor
    upper: Tensor


class Selected(NamedTuple, Generic[Bound]):
    """An unordered selection of k items.

    ``values`` ``(B, M, d)`` bounds the items that are or may be selected, ``index`` ``(B, M)`` tells which they are, ``members``
    ``(B, M)`` is 1 for an item that is selected for certain, a half for one that may be, 0 for a filler, and exactly ``rest``
    ``(B,)`` of the halves are.
    """

    values: Bound
    index: Tensor
    members: Tensor
    rest: Tensor


def rank_bounds(scores: Domain, members: Tensor | None = None, rest: Tensor | None = None) -> Ranks:
    """Between which numbers the rank of every item lies among those that take part.

    Ties go to the earlier item. After an earlier selection (``members``) the order of the items is not known, and a tie may go either way.

    Args:
        scores: ``(B, N)``; an upper end of -inf means that the item takes no part.
        members: ``(B, N)``, 1, 0, or a half for an item that may take part.
        rest: ``(B,)``, how many of the halves do.
    """
    here, maybe = _taking_part(scores, members)
    low, high = _apart(scores)  # [b, i, j]: s_j - s_i
    n = scores.shape[-1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=low.device).tril(-1)  # j before i
    ahead_if_tied = earlier if members is None else torch.zeros_like(earlier)
    maybe_if_tied = earlier if members is None else torch.ones_like(earlier)
    other = ~torch.eye(n, dtype=torch.bool, device=low.device)
    surely = ((low > 0) | (low >= 0) & ahead_if_tied) & other
    possibly = ((high > 0) | (high >= 0) & maybe_if_tied) & other
    num_maybe, left = maybe.sum(-1, keepdim=True), _column(rest, maybe)
    absent = (num_maybe - left).clamp(min=0)
    fewest = _count(surely, here) + (_count(surely, maybe) - absent).clamp(min=0)
    most = _count(possibly, here) + torch.minimum(_count(possibly, maybe), left)
    if isinstance(scores, Affine) and members is None:
        by_lines_low, by_lines_high = _by_lines(scores, low, high, (here & other.any(-1)).unsqueeze(1) & other)
        fewest, most = torch.maximum(fewest, by_lines_low), torch.minimum(most, by_lines_high)
    return Ranks(fewest + 1, most + 1)


def topk(x: Bound, scores: Bound, k: int | Tensor, members: Tensor | None = None, rest: Tensor | None = None) -> Selected[Bound]:
    """The k items with the largest scores as an unordered set.

    Args:
        x: ``(B, N, d)``.
        scores: ``(B, N)``.
        k: how many, an int or ``(B,)``.
        members: of an earlier selection, ``(B, N)``.
        rest: of an earlier selection, ``(B,)``.

    Example:
        >>> scores = Box.around(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), 0.6)
        >>> found = topk(Box.around(torch.zeros(1, 4, 2), 0.0), scores, 2)
        >>> found.index, found.members, found.rest
        (tensor([[0, 1, 2]]), tensor([[1.0000, 0.5000, 0.5000]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    _check(x, scores, k)
    here, maybe = _taking_part(scores, members)
    ranks = rank_bounds(scores, members, rest)
    count = torch.as_tensor(k, dtype=WORK, device=scores.lower.device).expand(scores.shape[0]).unsqueeze(-1)
    present = here.sum(-1, keepdim=True) + _column(rest, maybe)
    count = torch.minimum(count, present.to(WORK))  # fewer are there: all of them are selected
    kept = here & (ranks.upper <= count)
    open_ = (here | maybe) & ~kept & (ranks.lower <= count)
    state = kept.to(WORK) + 0.5 * open_.to(WORK)
    order = ((state == 0).to(WORK)).sort(dim=-1, stable=True).indices[:, : max(1, int((state > 0).sum(-1).max()))]
    return Selected(gather(x, order), order, state.gather(-1, order), count.squeeze(-1) - kept.sum(-1))


def kth_best(x: Bound, scores: Bound, k: int) -> Bound:
    """The items in the first k places, ``(B, k, d)``, largest score first: each the hull of those that may be there.

    Example:
        >>> scores = Box.around(torch.tensor([[3.0, 1.0, 2.0]]), 0.6)
        >>> kth_best(Box.around(torch.tensor([[[0.0], [1.0], [5.0]]]), 0.0), scores, 2).upper
        tensor([[[5.],
                 [5.]]], dtype=torch.float64)
    """
    _check(x, scores, k)
    ranks = rank_bounds(scores)
    place = torch.arange(1, k + 1, dtype=torch.long, device=x.lower.device).view(1, -1, 1)
    can = (ranks.lower.unsqueeze(1) <= place) & (ranks.upper.unsqueeze(1) >= place)  # (B, k, N)
    box = Box(
        torch.where(can.unsqueeze(-1), x.lower.unsqueeze(1), torch.inf).amin(2),
        torch.where(can.unsqueeze(-1), x.upper.unsqueeze(1), -torch.inf).amax(2),
    )
    return cast("Bound", _hull(x, can, box) if isinstance(x, Affine) else box)


def _hull(x: Affine, can: Tensor, box: Box) -> Affine:
    """One of the items that ``can`` ``(B, k, N)`` be there: the mean of their forms, and how far each may be from it."""
    weight = can.to(WORK) / can.sum(-1, keepdim=True)
    mean = x.linear(lambda t: _rows(weight, t), terms=x.shape[-2])
    # Whichever item it is, it differs from the mean by a linear form of its own; the largest of these is slack.
    slack = torch.zeros_like(mean.centre)
    for i in range(x.shape[-2]):
        away = (x.form[:, :, i : i + 1] - mean.form).abs().sum(1) + (x.centre[:, i : i + 1] - mean.centre).abs() + x.slack[:, i : i + 1]
        slack = torch.where(can[:, :, i : i + 1], torch.maximum(slack, away), slack)
    return affine(mean.centre, mean.form, slack + mean.slack, box)


def _rows(weight: Tensor, t: Tensor) -> Tensor:
    """``(B, k, N) @ (B, ..., N, d)``."""
    return weight.view(weight.shape[0], *[1] * (t.ndim - 3), *weight.shape[1:]) @ t


def enumerate_cases(x: Bound, scores: Bound, k: int) -> Iterator[tuple[Tensor, Bound]]:
    """Every selection that is possible, one after the other: the slow way, for one image and few undecided items.

    Yields:
        The indices ``(1, k)`` of the selected items in ascending order, and the bound ``(1, k, d)`` of their values.
    """
    if scores.shape[0] != 1:
        raise ValueError(f"cases are enumerated for one image at a time, got a batch of {scores.shape[0]}")
    found = topk(x, scores, k)
    sure, maybe = found.index[0][found.members[0] == 1], found.index[0][found.members[0] == 0.5]
    for index in combinations_of(sure, maybe, int(found.rest[0])):
        yield index, gather(x, index)


def combinations_of(sure: Tensor, maybe: Tensor, rest: int) -> Iterator[Tensor]:
    """All of ``sure`` with ``rest`` of ``maybe``: indices ``(1, k)`` in ascending order."""
    if len(maybe) > MOST_UNDECIDED:
        raise ValueError(f"at most {MOST_UNDECIDED} undecided items can be enumerated, got {len(maybe)}; use topk, which needs no cases")
    for more in combinations(maybe.tolist(), rest):
        yield torch.tensor([sorted([*sure.tolist(), *more])], dtype=torch.long, device=sure.device)


def _check(x: Bound, scores: Bound, k: int | Tensor) -> None:
    if x.shape[:-1] != scores.shape:
        raise ValueError(f"x must be (B, N, d) for scores (B, N), got {tuple(x.shape)} and {tuple(scores.shape)}")
    if type(x) is not type(scores):
        raise TypeError(f"x and scores must be of one domain, got {type(x).__name__} and {type(scores).__name__}")
    if bool(scores.lower.isnan().any() | scores.upper.isnan().any()):
        raise ValueError("scores must not be nan; a bound that is not known is -inf or inf")
    if isinstance(k, int) and not 0 <= k <= scores.shape[-1]:
        raise ValueError(f"k must be between 0 and n={scores.shape[-1]}, got {k}")


def _taking_part(scores: Domain, members: Tensor | None) -> tuple[Tensor, Tensor]:
    there = scores.upper > -torch.inf
    if members is None:
        return there, torch.zeros_like(there)
    return there & (members == 1), there & (members == 0.5)


def _column(rest: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like[:, :1], dtype=torch.long) if rest is None else rest.long().unsqueeze(-1)


def _count(ahead: Tensor, who: Tensor) -> Tensor:
    return (ahead & who.unsqueeze(1)).sum(-1)


def _differences(t: Tensor) -> Tensor:
    return t.unsqueeze(-2) - t.unsqueeze(-1)


def _apart(scores: Domain) -> tuple[Tensor, Tensor]:
    """The ends of ``s_j - s_i``."""
    low, high = scores.lower, scores.upper
    box_low, box_high = low.unsqueeze(-2) - high.unsqueeze(-1), high.unsqueeze(-2) - low.unsqueeze(-1)
    box_low, box_high = box_low.nan_to_num(-torch.inf, torch.inf, -torch.inf), box_high.nan_to_num(torch.inf, torch.inf, -torch.inf)
    if not isinstance(scores, Affine):
        return box_low, box_high
    apart = scores.linear(_differences, lambda t: t.unsqueeze(-2) + t.unsqueeze(-1), 2)
    return torch.maximum(box_low, apart.lower), torch.minimum(box_high, apart.upper)


def _by_lines(scores: Affine, low: Tensor, high: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """How many are ahead at least and at most, by the lines of h as linear forms of the input."""
    above = _sum_of_lines(scores, heaviside(low, high), among, upper=True)
    # j is ahead of i for certain where not (s_i >= s_j), which is 1 minus the step of the negative difference.
    behind = _sum_of_lines(scores, _mirrored(heaviside(-high, -low)), among, upper=True)
    return among.sum(-1) - _whole(behind, among), _whole(above, among)


def _whole(most: Tensor, among: Tensor) -> Tensor:
    """As many as a number that is at least 0 allows, and all of them where it is too large for an integer or unknown."""
    return torch.fmin(most.floor(), among.sum(-1).to(WORK)).long()


def _mirrored(lines: Lines) -> Lines:
    """The same lines as functions of the negative argument."""
    return Lines(-lines.lower_slope, lines.lower_intercept, -lines.upper_slope, lines.upper_intercept)


def _sum_of_lines(scores: Affine, lines: Lines, among: Tensor, *, upper: bool) -> Tensor:
    """The largest value of the sum over j of the upper lines, linear forms of the input."""
    slope, constant = lines.upper_slope * among, (lines.upper_intercept * among).sum(-1)
    centre = (slope * _differences(scores.centre)).sum(-1) + constant
    # sum_j slope_ij (s_j - s_i) has the form sum_j slope_ij A_j - (sum_j slope_ij) A_i.
    form = torch.einsum("bij,bmj->bmi", slope, scores.form) - slope.sum(-1).unsqueeze(1) * scores.form
    slack = (slope.abs() * (scores.slack.unsqueeze(-2) + scores.slack.unsqueeze(-1))).sum(-1)
    far = scores.centre.abs() + scores.reach
    size = (slope.abs() * (far.unsqueeze(-2) + far.unsqueeze(-1))).sum(-1) + (lines.upper_intercept.abs() * among).sum(-1)
    return centre + form.abs().sum(1) + slack + room(size, scores.shape[-1] + scores.form.shape[1])
