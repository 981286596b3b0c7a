"""One term of an equation for another: which exchanges a linearised loss promises most of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Exchange(NamedTuple):
    """Other weights ``(dim, p)``, exactly 0 where a term is not chosen, and the sum of squares that is promised for them."""

    weight: Tensor
    promised: float


@torch.no_grad()
def promising(residual: Callable[[Tensor], Tensor], weight: Tensor, chosen: Tensor, most: int) -> list[Exchange]:
    """The best exchanges of one chosen term for another term of the same equation, by Gauss and Newton.

    With the Jacobian :math:`J` of the residual :math:`r` at the weights :math:`w` the loss of other weights is about
    :math:`|J (w' - w) + r|^2`, a least-squares problem of its own for each exchange; all of them are solved at once.

    Args:
        residual: ``(dim, p)`` to a vector.
        weight: ``(dim, p)``, 0 where a term is not chosen.
        chosen: ``(dim, p)`` of bool.
        most: how many to return.
    """
    flat = torch.func.jacfwd(residual)(weight).flatten(1)  # (N, dim p)
    target = flat @ weight.flatten() - residual(weight)
    on, equation = chosen.flatten().nonzero()[:, 0], torch.arange(len(chosen), device=chosen.device).repeat_interleave(chosen.shape[1])
    out, into = ((equation[on].unsqueeze(1) == equation) & ~chosen.flatten()).nonzero().unbind(1)
    if not len(out):
        return []
    sets = on.repeat(len(out), 1)  # (M, terms)
    sets[torch.arange(len(out), device=out.device), out] = into
    gram, moment = flat.mT @ flat, flat.mT @ target
    left = gram[sets.unsqueeze(2), sets.unsqueeze(1)]
    ridge = 1e-10 * left.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-300)  # terms that cannot be told apart
    left = left + ridge[:, None, None] * torch.eye(len(on), dtype=left.dtype, device=left.device)
    solved = torch.linalg.solve(left, moment[sets])
    loss = target.square().sum() - (solved * moment[sets]).sum(1)
    loss = torch.where(loss.isfinite(), loss, torch.inf)
    best = loss.argsort()[:most]
    weights = weight.new_zeros(len(best), weight.numel()).scatter(1, sets[best], solved[best])
    return [Exchange(one.view_as(weight), float(promised)) for one, promised in zip(weights, loss[best], strict=True)]
