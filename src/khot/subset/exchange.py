"""Exchanges of one column against another, for many sets at once, by rank-one updates of the inverse Gram matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot.subset.problem import JITTER, Problem

ROUNDS = 1000  # a bound on the exchanges of one set; each of them lowers its loss
SLACK = 1e-13  # an exchange counts if it lowers the loss by this share of the target's squared length
MOST = 1 << 22  # entries of the largest intermediate in one piece


class Sets(NamedTuple):
    """Sets of groups, each for one target. A set smaller than ``K`` has the number of groups, ``G``, in its last places."""

    which: Tensor  # (B,), the target
    support: Tensor  # (B, K), sorted
    loss: Tensor  # (B,), squared residual


class _Fit(NamedTuple):
    inverse: Tensor  # (B, K g, K g) of the Gram matrix of the set
    rows: Tensor  # (B, K g, G + 1, g): the Gram matrix from the set to all groups
    weights: Tensor  # (B, K g, w): coefficients
    rest: Tensor  # (B, G + 1, g, w): products of all columns with the residual
    loss: Tensor  # (B,)


def descend(problem: Problem, which: Tensor, support: Tensor) -> Sets:
    """Exchange one group for another as long as that lowers the loss; sets that meet are followed once.

    Args:
        problem: the normalised regression.
        which: ``(B,)``, the target of each set.
        support: ``(B, K)``, the groups at the start.
    """
    done: list[Sets] = []
    open_which, open_support = distinct(which, support)
    for _ in range(ROUNDS):
        loss, gain, out, into = best_exchange(problem, open_which, open_support)
        better = gain > SLACK * problem.total[open_which]
        done.append(Sets(open_which[~better], open_support[~better], loss[~better]))
        if not bool(better.any()):
            break
        moved = open_support[better].scatter(1, out[better].unsqueeze(1), into[better].unsqueeze(1))
        open_which, open_support = distinct(open_which[better], moved)
    return Sets(*(torch.cat(parts) for parts in zip(*done, strict=True)))


def distinct(which: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair of a target and a set once, with the set in order."""
    rows = torch.cat([which.unsqueeze(1), support.sort(-1).values], 1).unique(dim=0)
    return rows[:, 0], rows[:, 1:]


def best_exchange(problem: Problem, which: Tensor, support: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss of each set, by how much its best exchange lowers it, the place to empty and the group to take in."""
    piece = max(1, MOST // max(1, support.shape[1] * problem.gram[0, :, :, 0].numel()))
    parts = [_best(problem, a, b) for a, b in zip(which.split(piece), support.split(piece), strict=True)]
    loss, gain, out, into = (torch.cat(column) for column in zip(*parts, strict=True))
    return loss, gain, out, into


def _best(problem: Problem, which: Tensor, support: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fit = _solve(problem, which, support)
    gains = _gains(problem, which, support, fit)  # (B, K, G)
    if gains.numel() == 0:
        nothing = torch.zeros_like(which)
        return fit.loss, torch.full_like(fit.loss, -torch.inf), nothing, nothing
    gain, place = gains.flatten(1).max(1)
    return fit.loss, gain, place // gains.shape[2], place % gains.shape[2]


def _solve(problem: Problem, which: Tensor, support: Tensor) -> _Fit:
    """Least squares on each set."""
    b, size = support.shape
    sample, g = problem.sample_of(which), problem.gram.shape[2]
    rows = problem.gram[sample.unsqueeze(1), support].flatten(1, 2)  # (B, K g, G + 1, g)
    places = support[:, None, :, None].expand(b, size * g, size, g)
    inner = rows.gather(2, places).flatten(2)  # (B, K g, K g)
    # The empty group has a row of zeros but for the jitter; 1 on the diagonal keeps its place apart from the others.
    empty = (support == problem.num_groups).repeat_interleave(g, 1)
    inner = inner.masked_fill(empty.unsqueeze(1) | empty.unsqueeze(2), 0.0)
    inner.diagonal(dim1=1, dim2=2).add_(empty)
    rows = rows.masked_fill(empty[:, :, None, None], 0.0)
    inverse = torch.linalg.inv_ex(inner).inverse
    moment = problem.moment[which]  # (B, G + 1, g, w)
    own = moment.gather(1, support[:, :, None, None].expand(b, size, *moment.shape[2:])).flatten(1, 2)
    weights = inverse @ own
    rest = moment - (rows.flatten(2).mT @ weights).reshape(moment.shape)
    return _Fit(inverse, rows, weights, rest, problem.total[which] - (own * weights).sum((1, 2)))


def _gains(problem: Problem, which: Tensor, support: Tensor, fit: _Fit) -> Tensor:
    r"""By how much each exchange lowers the loss, ``(B, K, G)``.

    With :math:`A` the inverse of the set's Gram matrix, :math:`U = A G_S`, coefficients :math:`\beta` and products :math:`r` of the columns
    with the residual, leaving out :math:`i` costs :math:`\beta_i^T A_{ii}^{-1} \beta_i`, and taking in :math:`j` then gains
    :math:`c^T d^{-1} c` with :math:`c = r_j + U_{ij}^T A_{ii}^{-1} \beta_i` and :math:`d = D_j + U_{ij}^T A_{ii}^{-1} U_{ij}`, where
    :math:`D_j` is what the set leaves of the group's own Gram matrix.
    """
    b, size = support.shape
    g = problem.gram.shape[2]
    u = (fit.inverse @ fit.rows.flatten(2)).reshape(b, size, g, problem.num_groups + 1, g)
    left = _leftover(problem, which, fit, u)  # (B, G + 1, g, g)
    blocks = fit.inverse.reshape(b, size, g, size, g).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # (B, K, g, g)
    step = _solve_blocks(blocks, fit.weights.unflatten(1, (size, g)))  # (B, K, g, w)
    cost = (step * fit.weights.reshape(step.shape)).sum((2, 3))
    c = fit.rest.unsqueeze(1) + torch.einsum("bkajc,bkaw->bkjcw", u, step)
    d = left.unsqueeze(1) + torch.einsum("bkajc,bkaje->bkjce", u, _solve_blocks(blocks, u.flatten(3)).reshape(u.shape))
    gains = _quadratic(d, c)[..., :-1] - cost.unsqueeze(2)
    taken = torch.zeros((b, problem.num_groups + 1), dtype=torch.bool, device=support.device).scatter(1, support, True)
    closed = taken[:, None, :-1] | (support == problem.num_groups).unsqueeze(2)
    return gains.masked_fill(closed, -torch.inf)


def _leftover(problem: Problem, which: Tensor, fit: _Fit, u: Tensor) -> Tensor:
    """What the set leaves of each group's own Gram matrix, ``(B, G + 1, g, g)``."""
    own = problem.gram.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)[problem.sample_of(which)]
    return own - torch.einsum("bnjc,bnje->bjce", fit.rows, u.reshape(fit.rows.shape))


def _solve_blocks(blocks: Tensor, right: Tensor) -> Tensor:
    """``blocks^-1 right`` for symmetric blocks; 1 x 1 blocks divide."""
    if blocks.shape[-1] == 1:
        return right / blocks
    return torch.linalg.solve_ex(blocks, right).result


def _quadratic(d: Tensor, c: Tensor) -> Tensor:
    """``tr c^T d^-1 c``; a block that rounding left without a positive inverse adds nothing."""
    if d.shape[-1] == 1:
        return c.square().sum((-2, -1)) / d[..., 0, 0].clamp(min=JITTER)
    factor, info = torch.linalg.cholesky_ex(d)
    half = torch.linalg.solve_triangular(factor, c, upper=False)
    return torch.where(info == 0, half.square().sum((-2, -1)), 0.0)


def best_addition(problem: Problem, which: Tensor, support: Tensor) -> Tensor:
    """The group that lowers the loss of each set most when it is added."""
    fit = _solve(problem, which, support)
    u = (fit.inverse @ fit.rows.flatten(2)).reshape(fit.rows.shape)
    gains = _quadratic(_leftover(problem, which, fit, u), fit.rest)[:, :-1]
    taken = torch.zeros((len(support), problem.num_groups + 1), dtype=torch.bool, device=support.device).scatter(1, support, True)
    return gains.masked_fill(taken[:, :-1], -torch.inf).argmax(1)
