"""The last exchanges in accurate arithmetic: orthogonal projections instead of the Gram matrix, whose condition is the square."""

from __future__ import annotations

import torch
from torch import Tensor

from khot.subset.exchange import ROUNDS, Sets
from khot.subset.problem import Problem, span

TINY = 1e-14  # a direction of which the other columns leave this share of its squared length counts as theirs


def polish(problem: Problem, sets: Sets) -> Sets:
    """Exchange groups until no exchange lowers the loss by more than rounding; every set has its exact loss.

    This is also the check of the search: a set that comes back as it was is a local optimum, computed in another way.
    """
    support, loss = sets.support.clone(), exact_loss(problem, sets.which, sets.support)
    moving = torch.arange(len(support), dtype=torch.long, device=support.device)
    for _ in range(ROUNDS):
        if not len(moving):
            break
        which = sets.which[moving]
        moved = torch.stack([_best_move(problem, t, s) for t, s in zip(which, support[moving], strict=True)])
        new = exact_loss(problem, which, moved)
        better = new < loss[moving] - torch.finfo(loss.dtype).eps * problem.total[which]
        moving = moving[better]
        support[moving], loss[moving] = moved[better], new[better]
    return Sets(sets.which, support.sort(-1).values, loss)


def exact_loss(problem: Problem, which: Tensor, support: Tensor) -> Tensor:
    """Squared residuals by orthogonal projection, ``(B,)``."""
    padded = torch.nn.functional.pad(problem.x, (0, 0, 0, 1))  # the empty group has zeros
    columns = padded[problem.sample_of(which).unsqueeze(1), :, support].transpose(1, 2).flatten(2)  # (B, q, K g)
    return (away(span(columns), _target(problem, which))).square().sum((1, 2))


def away(basis: Tensor, columns: Tensor) -> Tensor:
    """What an orthonormal basis leaves of the columns."""
    return columns - basis @ (basis.mT @ columns)


def _target(problem: Problem, which: Tensor) -> Tensor:
    return problem.y[problem.sample_of(which), :, which % problem.num_targets]  # (..., q, w)


def _best_move(problem: Problem, which: Tensor, support: Tensor) -> Tensor:
    """One set after its best exchange, or as it is where there is none."""
    size = int((support < problem.num_groups).sum())
    if size == 0:
        return support
    x = problem.x[problem.sample_of(which)]  # (q, G, g)
    others = torch.stack([torch.cat([support[:i], support[i + 1 : size]]) for i in range(size)])  # (size, size - 1)
    basis = span(x[:, others].permute(1, 0, 2, 3).flatten(2))
    y = away(basis, _target(problem, which))  # (size, q, w)
    left = away(basis, x.flatten(1)).unflatten(2, x.shape[1:])  # (size, q, G, g)
    loss = y.square().sum((1, 2)).unsqueeze(1) - _explained(left, y)
    place, group = divmod(int(loss.argmin()), loss.shape[1])
    moved = support.clone()
    moved[place] = group
    return moved


def _explained(left: Tensor, y: Tensor) -> Tensor:
    """How much of ``y`` each group explains by what is left of its columns, ``(size, G)``."""
    c = torch.einsum("iqjc,iqw->ijcw", left, y)
    if left.shape[-1] == 1:
        d = left.square().sum((1, 3))
        return torch.where(d > TINY, c.square().sum((2, 3)) / d.clamp(min=TINY), 0.0)
    values, vectors = torch.linalg.eigh(torch.einsum("iqjc,iqje->ijce", left, left))
    along = (vectors.mT @ c).square().sum(3)
    return torch.where(values > TINY, along / values.clamp(min=TINY), 0.0).sum(2)
