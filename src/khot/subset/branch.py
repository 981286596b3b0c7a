"""Proof by branch and bound that a set is the best one: the allowed columns are halved until no part can hold a better set."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot.subset.problem import Problem

# The bounds are those of a regression with this ridge on columns of length 1, so that dependent columns have a bound too. The proof says
# that no set has a loss below the one found by more than RIDGE times its squared coefficients.
RIDGE = 1e-12
SLACK = 1e-9  # a part is left out if its bound is not below the best loss by this share
BATCH = 2048  # nodes in one step


class _Nodes(NamedTuple):
    kept: Tensor  # (B, G) of bool: groups that every set of this part has
    allowed: Tensor  # (B, G) of bool: groups that its sets may have


def prove(problem: Problem, which: int, support: Tensor, nodes: int) -> tuple[Tensor, bool]:
    """A best set of the size of ``support``, and whether that is proven.

    Args:
        problem: the normalised regression.
        which: the target.
        support: ``(G,)`` of bool, the best set that is known.
        nodes: how many parts may be looked at.
    """
    size = int(support.sum())
    x, y = _columns(problem, which)
    best, best_loss = support, float(_loss(x, y, support.unsqueeze(0))[0])
    none = torch.zeros((1, problem.num_groups), dtype=torch.bool, device="cpu")
    stack, seen = [_Nodes(none, ~none)], 0
    while stack:
        here = _take(stack)
        seen += len(here.kept)
        if seen > nodes:
            return best, False
        loss, cost = _bounds(x, y, here)
        found, found_loss = _leaf(x, y, here, cost, size)
        if found_loss < best_loss * (1 - SLACK):
            best, best_loss = found, found_loss
        surplus = here.allowed.sum(1) - size
        least = loss + _cheapest(cost, surplus)  # each column that must go costs at least what it costs alone
        open_part = (surplus > 0) & (here.kept.sum(1) < size) & (least < best_loss * (1 - SLACK))
        if bool(open_part.any()):
            stack.append(_children(here, cost, open_part))
    return best, True


def _take(stack: list[_Nodes]) -> _Nodes:
    """Up to ``BATCH`` nodes from the top: the deepest come first, so that few are kept."""
    top = stack.pop()
    if len(top.kept) > BATCH:
        stack.append(_Nodes(top.kept[:-BATCH], top.allowed[:-BATCH]))
        top = _Nodes(top.kept[-BATCH:], top.allowed[-BATCH:])
    return top


def _children(here: _Nodes, cost: Tensor, open_part: Tensor) -> _Nodes:
    """The most expensive free group of each part is left out in one child, whose bound rises most, and kept in the other."""
    kept, allowed = here.kept[open_part], here.allowed[open_part]
    free = cost[open_part].masked_fill(kept | ~allowed, -torch.inf)
    mark = torch.nn.functional.one_hot(free.argmax(1), free.shape[1]).bool()
    return _Nodes(torch.cat([kept, kept | mark]), torch.cat([allowed & ~mark, allowed]))


def _columns(problem: Problem, which: int) -> tuple[Tensor, Tensor]:
    """``(q, G, g)`` and ``(q, w)``."""
    sample, target = divmod(which, problem.num_targets)
    return problem.x[sample], problem.y[sample, :, target]


def _triangle(x: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
    """The triangular factor of the allowed columns beside the targets, with the ridge below, ``(B, p + w, p + w)``."""
    q, groups, g = x.shape
    columns = (x * allowed[:, None, :, None]).flatten(2)  # (B, q, p)
    p, w = groups * g, y.shape[1]
    top = torch.cat([columns, y.expand(len(allowed), q, w)], 2)
    ridge = torch.eye(p, p + w, dtype=x.dtype, device=x.device).mul(RIDGE**0.5).expand(len(allowed), p, p + w)
    floor = torch.zeros((len(allowed), max(0, w - q), p + w), dtype=x.dtype, device=x.device)  # at least as many rows as columns
    return torch.linalg.qr(torch.cat([top, ridge, floor], 1), mode="r").R


def _bounds(x: Tensor, y: Tensor, here: _Nodes) -> tuple[Tensor, Tensor]:
    """The loss with all allowed groups ``(B,)``, and what leaving out each of them alone adds ``(B, G)``, 0 for any other."""
    _, groups, g = x.shape
    p, w = groups * g, y.shape[1]
    r = _triangle(x, y, here.allowed)
    inverse = torch.linalg.solve_triangular(r[:, :p, :p], torch.eye(p, dtype=x.dtype, device=x.device).expand(len(r), p, p), upper=True)
    weights = inverse @ r[:, :p, p:]  # (B, p, w)
    rows = inverse.reshape(len(r), groups, g, p)
    blocks, own = rows @ rows.mT, weights.reshape(len(r), groups, g, w)
    cost = (own * torch.linalg.solve(blocks, own)).sum((2, 3)) if g > 1 else own.square().sum((2, 3)) / blocks[..., 0, 0]
    return r[:, p:, p:].square().sum((1, 2)), cost * here.allowed


def _loss(x: Tensor, y: Tensor, sets: Tensor) -> Tensor:
    p = x.shape[1] * x.shape[2]
    return _triangle(x, y, sets)[:, p:, p:].square().sum((1, 2))


def _cheapest(cost: Tensor, surplus: Tensor) -> Tensor:
    """The ``surplus``-th smallest cost of a group that may go, ``(B,)``."""
    ordered = cost.sort(1).values  # groups that are not there cost 0 and stand first
    gone = cost.shape[1] - (cost > 0).sum(1)
    return ordered.gather(1, (gone + surplus - 1).clamp(0, cost.shape[1] - 1).unsqueeze(1)).squeeze(1)


def _leaf(x: Tensor, y: Tensor, here: _Nodes, cost: Tensor, size: int) -> tuple[Tensor, float]:
    """The best of the sets that are made by keeping what is most expensive to leave out."""
    order = cost.masked_fill(here.kept, torch.inf).masked_fill(~here.allowed, -torch.inf).topk(size, dim=1).indices
    sets = torch.zeros_like(here.kept).scatter(1, order, True)
    losses = _loss(x, y, sets)
    return sets[losses.argmin()], float(losses.min())
