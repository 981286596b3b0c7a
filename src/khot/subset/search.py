"""The best sets of every size for every target, at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from khot.subset.branch import prove
from khot.subset.exchange import Sets, descend
from khot.subset.polish import exact_loss, polish
from khot.subset.problem import Problem
from khot.subset.starts import starts

NUM_STARTS = 32
FINALISTS = 2  # sets of each size that are compared and finished in accurate arithmetic


class Found(NamedTuple):
    """The best sets; ``T`` targets, which are the outputs of each sample, or one for each sample where outputs share their columns."""

    support: Tensor  # (sizes, T, G) of bool
    loss: Tensor  # (sizes, T), squared residual
    proven: Tensor  # (sizes, T) of bool: no other set of this size is better


def best_subsets(problem: Problem, sizes: Sequence[int], *, num_starts: int = NUM_STARTS, seed: int = 0, nodes: int = 0) -> Found:
    """The groups that explain each target best.

    Args:
        problem: what :func:`khot.subset.problem.make_problem` makes of columns and targets.
        sizes: how many groups, in rising order, each at most the number of groups.
        num_starts: random starts for each size and target, beside a forward and a relaxed one.
        seed: of the random starts.
        nodes: with more than 0, prove the result by branch and bound with at most so many nodes for each size and target.
    """
    generator = torch.Generator().manual_seed(seed)
    which, support = starts(problem, sizes, num_starts, generator)
    ended = _first(descend(problem, which, support), problem.num_groups, FINALISTS)
    best = _first(polish(problem, ended), problem.num_groups, 1)
    count = (best.support < problem.num_groups).sum(1)
    masks = torch.zeros((len(sizes), len(problem.total), problem.num_groups + 1), dtype=torch.bool, device="cpu")
    losses = torch.zeros((len(sizes), len(problem.total)), dtype=torch.float64, device="cpu")
    row = torch.searchsorted(torch.tensor(sizes, dtype=torch.long, device="cpu"), count)
    losses[row, best.which] = best.loss
    masks[row.unsqueeze(1), best.which.unsqueeze(1), best.support] = True
    found = Found(masks[..., :-1], losses, torch.zeros_like(losses, dtype=torch.bool))
    return _proven(problem, found, nodes) if nodes else found


def _proven(problem: Problem, found: Found, nodes: int) -> Found:
    """The same with the marks of proof, and a better set where the proof turned one up."""
    support, loss, proven = found.support.clone(), found.loss.clone(), found.proven.clone()
    for row in range(support.shape[0]):
        for which in range(support.shape[1]):
            support[row, which], proven[row, which] = prove(problem, which, support[row, which], nodes)
            chosen = support[row, which].nonzero().T
            loss[row, which] = exact_loss(problem, torch.tensor([which], dtype=torch.long, device="cpu"), chosen)[0]
    return Found(support, loss, proven)


def _first(sets: Sets, groups: int, most: int) -> Sets:
    """The ``most`` sets with the smallest loss for each target and size."""
    key = sets.which * (groups + 1) + (sets.support < groups).sum(1)
    order = sets.loss.argsort(stable=True)
    order = order[key[order].argsort(stable=True)]  # by target and size, best first
    ranked = key[order]
    begins = torch.searchsorted(ranked, ranked)
    kept = order[torch.arange(len(order), dtype=torch.long, device="cpu") - begins < most]
    return Sets(sets.which[kept], sets.support[kept], sets.loss[kept])
