"""Where the search starts: columns taken in one by one, the best pairs, the relaxed mask, and random sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from khot.soft import soft_topk
from khot.subset.exchange import best_addition
from khot.subset.problem import JITTER, Problem

RELAXED_STEPS = 30
PAIRS = 16  # best pairs of each target from which sets grow
MOST = 2048  # groups; the pairs of more of them take too much memory


def starts(problem: Problem, sizes: Sequence[int], random: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Targets ``(B,)`` and sets ``(B, K)``: for every target and size forward ones, a relaxed one and ``random`` random starts."""
    targets = torch.arange(len(problem.total), dtype=torch.long, device="cpu")
    most, empty = max(sizes), problem.num_groups
    forward, own = forward_orders(problem, targets, most)  # (F, K), (F,)
    found = []
    for size, order in zip(sizes, relaxed_order(problem, sizes), strict=True):
        drawn = torch.rand((len(targets) * random, empty), dtype=torch.float64, device="cpu", generator=generator).argsort(1)
        chosen = torch.cat([forward[:, :size], order[:, :size], drawn[:, :size]])
        found.append(torch.nn.functional.pad(chosen, (0, most - size), value=empty))
    which = torch.cat([own, targets, targets.repeat_interleave(random)])
    return which.repeat(len(sizes)), torch.cat(found)


def forward_orders(problem: Problem, targets: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Orders of groups ``(F, most)`` and their targets ``(F,)``: each group lowers the loss most beside those before it.

    For every target one begins with nothing, the others with its best pairs.
    """
    pairs = best_pairs(problem) if most > 1 else targets.new_empty((len(targets), 0, 2))
    paired = targets.repeat_interleave(pairs.shape[1])
    alone = _extend(problem, targets, targets.new_empty((len(targets), 0)), most)
    return torch.cat([alone, _extend(problem, paired, pairs.flatten(0, 1)[:, :most], most)]), torch.cat([targets, paired])


def _extend(problem: Problem, which: Tensor, order: Tensor, most: int) -> Tensor:
    while order.shape[1] < most:
        order = torch.cat([order, best_addition(problem, which, order).unsqueeze(1)], 1)
    return order


def best_pairs(problem: Problem) -> Tensor:
    r"""The pairs of columns that explain most of each target, by looking at all of them, ``(T, PAIRS, 2)``.

    With products :math:`c` with the target and :math:`g` among unit columns, a pair explains
    :math:`\lvert c_i \rvert^2 + \lvert c_j - g_{ij} c_i \rvert^2 / (1 - g_{ij}^2)`. None for groups of several columns, or for too many.
    """
    groups = problem.num_groups
    if problem.gram.shape[2] > 1 or not 2 <= groups <= MOST:
        return torch.empty((len(problem.total), 0, 2), dtype=torch.int64, device="cpu")
    gram, moment = problem.gram[:, :-1, 0, :-1, 0], problem.moment[:, :-1, 0]
    first, second = torch.triu_indices(groups, groups, 1, dtype=torch.int64, device="cpu")
    count = min(PAIRS, len(first))
    found = []
    for target, c in enumerate(moment):  # one at a time: G^2 numbers each
        g = gram[target // problem.num_targets]
        left = 1 - g.square()
        more = torch.stack([(column - g * column.unsqueeze(1)).square() for column in c.unbind(1)]).sum(0)
        gain = c.square().sum(1, keepdim=True) + torch.where(left > JITTER, more / left, 0.0)
        best = gain[first, second].topk(count).indices
        found.append(torch.stack([first[best], second[best]], 1))
    return torch.stack(found)


def relaxed_order(problem: Problem, sizes: Sequence[int]) -> Tensor:
    r"""The groups by their strength at the end of a relaxed search for each size, ``(sizes, T, G)``.

    Gradient steps on the coefficients, each followed by a soft mask of the largest, whose temperature falls:
    :math:`\beta \leftarrow m \odot (\beta + \eta (c - G \beta))`.
    """
    count, groups, g, _ = problem.moment.shape
    gram = problem.gram.flatten(3).flatten(1, 2)  # (S, (G + 1) g, (G + 1) g)
    step = 1 / torch.linalg.matrix_norm(gram, ord=torch.inf)[:, None, None, None]  # at least the largest eigenvalue
    moment = problem.moment.flatten(1, 2).unflatten(0, (len(gram), -1))  # (S, O, (G + 1) g, w)
    weights = torch.zeros((len(sizes), *moment.shape), dtype=moment.dtype, device="cpu")
    k = torch.tensor(sizes, dtype=moment.dtype, device="cpu").unsqueeze(1).expand(-1, count)
    strength = torch.zeros((len(sizes), count, groups - 1), dtype=moment.dtype, device="cpu")
    for turn in range(RELAXED_STEPS):
        weights = weights + step * (moment - gram.unsqueeze(1) @ weights)
        strength = weights.reshape(len(sizes), count, groups, -1).norm(dim=3)[..., :-1]
        tau = strength.std(2, correction=0).clamp(min=1e-300) * 0.5 ** (turn / 5)
        mask = torch.nn.functional.pad(soft_topk(strength, k, tau), (0, 1)).repeat_interleave(g, 2)
        weights = weights * mask.reshape(*weights.shape[:4], 1)
    return strength.argsort(dim=2, descending=True, stable=True)
