"""Where the search starts: columns taken in one by one, the relaxed mask, and random sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from khot.soft import soft_topk
from khot.subset.exchange import best_addition
from khot.subset.problem import Problem

RELAXED_STEPS = 30


def starts(problem: Problem, sizes: Sequence[int], random: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Targets ``(B,)`` and sets ``(B, K)``: for every target and size one forward, one relaxed and ``random`` random starts."""
    targets = torch.arange(len(problem.total), dtype=torch.long, device="cpu")
    most, empty = max(sizes), problem.num_groups
    forward = forward_order(problem, most)  # (T, K)
    found = []
    for size, order in zip(sizes, relaxed_order(problem, sizes), strict=True):
        drawn = torch.rand((len(targets) * random, empty), dtype=torch.float64, device="cpu", generator=generator).argsort(1)
        chosen = torch.cat([forward[:, :size], order[:, :size], drawn[:, :size]])
        found.append(torch.nn.functional.pad(chosen, (0, most - size), value=empty))
    which = torch.cat([targets, targets, targets.repeat_interleave(random)])
    return which.repeat(len(sizes)), torch.cat(found)


def forward_order(problem: Problem, most: int) -> Tensor:
    """The groups in the order in which each lowers the loss most beside those before it, ``(T, most)``."""
    targets = torch.arange(len(problem.total), dtype=torch.long, device="cpu")
    order = torch.empty((len(targets), 0), dtype=torch.int64, device="cpu")
    for _ in range(most):
        order = torch.cat([order, best_addition(problem, targets, order).unsqueeze(1)], 1)
    return order


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
