"""Orthogonal matching pursuit: k atoms for each of many rows at once, on the Gram matrix of the atoms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

START = 4  # places that a row has at first where an error decides how many it needs


class Support(NamedTuple):
    """The atoms of each row in the order in which they were found: ``(rows, places)``; ``there`` is False where a place is empty."""

    indices: Tensor
    there: Tensor


@torch.no_grad()
def matching_pursuit(correlation: Tensor, gram: Tensor, energy: Tensor, k: int, limit: Tensor | None = None) -> Support:
    r"""The atom that correlates best with what is left, then again, each time with all coefficients of the chosen atoms refitted.

    With :math:`q_i` the chosen atoms made orthonormal one after the other (a Cholesky factor that grows by a row), the correlations
    :math:`D r` of what is left follow from :math:`D q_i` alone: neither rows nor residuals are touched.

    Args:
        correlation: ``(rows, n)``, :math:`D x`, for atoms of length 1.
        gram: ``(n, n)``, :math:`D D^T`.
        energy: ``(rows,)``, :math:`\lVert x \rVert^2`.
        k: at most so many atoms for each row.
        limit: ``(rows,)``: a row stops as soon as its squared error is at most this.

    Returns:
        The support. A place stays empty where nothing is left to explain, or the best atom is a combination of those chosen before.

    Rubinstein, Zibulevsky, Elad: Efficient Implementation of the K-SVD Algorithm using Batch Orthogonal Matching Pursuit, 2008.
    """
    search = _Search(correlation, gram, energy, min(k, START) if limit is not None else k)
    for place in range(k):
        if limit is not None and not search.keep(limit):
            break
        search.add(place, k)
    return Support(search.indices, search.there)


class _Search:
    """The state of all rows that are not finished; ``rows`` says which they are."""

    def __init__(self, correlation: Tensor, gram: Tensor, energy: Tensor, places: int) -> None:
        size, n = correlation.shape
        self.gram, self.left, self.correlation = gram, energy, correlation
        eps = torch.finfo(correlation.dtype).eps
        self.floor = 8 * eps * energy.sqrt()  # smaller correlations are rounding
        self.independent = eps**0.5  # an atom with less than this outside the span of the others has no digits left
        self.rows: Tensor | None = None  # None: all
        self.indices = torch.zeros(size, places, dtype=torch.long, device=correlation.device)
        self.there = torch.zeros(size, places, dtype=torch.bool, device=correlation.device)
        self.basis = torch.zeros(size, places, n, dtype=correlation.dtype, device=correlation.device)  # D q
        self.chosen = torch.zeros_like(self.indices)  # those of the rows that are left

    def keep(self, limit: Tensor) -> bool:
        """Let the finished rows go; False if none is left."""
        limit = limit if self.rows is None else limit[self.rows]
        alive = self.left > limit
        count = int(alive.sum())
        if count == len(alive):
            return count > 0
        where = alive.nonzero().squeeze(1)
        self.rows = where if self.rows is None else self.rows[where]
        self.left, self.floor, self.chosen = self.left[where], self.floor[where], self.chosen[where]
        self.correlation, self.basis = self.correlation[where], self.basis[where]
        return count > 0

    def add(self, place: int, k: int) -> None:
        """One atom more for every row."""
        if place == self.indices.shape[1]:
            self._grow(min(k, 2 * place))
        score = self.correlation.abs().scatter_(1, self.chosen[:, :place], -1.0)
        best, new = score.max(1)
        before = self.basis[:, :place]
        weight = before.gather(2, new.view(-1, 1, 1).expand(-1, place, 1)).squeeze(2)  # (rows, place)
        atom = self.gram.index_select(0, new)
        outside = atom.gather(1, new.unsqueeze(1)).squeeze(1) - weight.square().sum(1)
        good = (best > self.floor) & (outside > self.independent)
        scale = torch.where(good, outside.clamp(min=self.independent).rsqrt(), 0.0).unsqueeze(1)
        direction = (atom - torch.bmm(weight.unsqueeze(1), before).squeeze(1)) * scale
        step = self.correlation.gather(1, new.unsqueeze(1)) * scale
        self.basis[:, place] = direction
        self.correlation = self.correlation - step * direction
        self.left = torch.where(good, self.left - step.squeeze(1).square(), self.left)
        self._write(place, new, good)

    def _write(self, place: int, new: Tensor, good: Tensor) -> None:
        self.chosen[:, place] = new
        if self.rows is None:
            self.indices[:, place], self.there[:, place] = new, good
        else:
            self.indices[self.rows, place], self.there[self.rows, place] = new, good

    def _grow(self, places: int) -> None:
        for name in ("indices", "there", "chosen", "basis"):
            old = getattr(self, name)
            wide = old.new_zeros(old.shape[0], places, *old.shape[2:])
            wide[:, : old.shape[1]] = old
            setattr(self, name, wide)


def least_squares(correlation: Tensor, gram: Tensor, support: Support) -> Tensor:
    """The coefficients on the support that leave the least squared error, ``(rows, places)``, 0 in empty places.

    Args:
        correlation: ``(rows, n)``.
        gram: ``(n, n)``, in the dtype in which the systems are solved.
        support: of :func:`matching_pursuit`.
    """
    indices, there = support
    places, n = indices.shape[1], gram.shape[0]
    flat = indices.unsqueeze(2) * n + indices.unsqueeze(1)
    system = gram.reshape(-1).index_select(0, flat.reshape(-1)).view(-1, places, places)
    unit = torch.eye(places, dtype=gram.dtype, device=gram.device)
    system = torch.where(there.unsqueeze(2) & there.unsqueeze(1), system, unit)
    right = torch.where(there, correlation.gather(1, indices), 0.0).to(gram.dtype)
    factor = torch.linalg.cholesky_ex(system).L
    return torch.cholesky_solve(right.unsqueeze(2), factor).squeeze(2).to(correlation.dtype)
