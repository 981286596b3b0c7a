"""Least squares with few columns, in the form that the search works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# What is added to the diagonal of the Gram matrix, whose own is 1. Two equal columns stay invertible, and the search leaves them by itself.
JITTER = 1e-12


class Problem(NamedTuple):
    """``S`` samples of one regression with ``G`` groups of at most ``g`` columns, and ``O`` targets of ``w`` outputs each.

    The rows are rotated to at most columns + outputs of them, and the columns of each group replaced by an orthonormal basis of what they
    span, so that the loss of a set of groups is the same. A group with fewer than ``g`` columns has zeros in the places left.
    """

    x: Tensor  # (S, q, G, g)
    y: Tensor  # (S, q, O, w)
    gram: Tensor  # (S, G + 1, g, G + 1, g); the last group is empty: it fills the places of smaller sets
    moment: Tensor  # (S * O, G + 1, g, w)
    total: Tensor  # (S * O,), squared length of each target

    @property
    def num_groups(self) -> int:
        return self.x.shape[2]

    @property
    def num_targets(self) -> int:
        """Targets of one sample."""
        return self.y.shape[2]

    def sample_of(self, which: Tensor) -> Tensor:
        return which // self.num_targets


def reduce_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``(..., n, p)`` and ``(..., n, m)`` rotated to ``min(n, p + m)`` rows: every least squares problem in these columns is the same."""
    p = x.shape[-1]
    if x.shape[-2] <= p + y.shape[-1]:
        return x, y
    r = torch.linalg.qr(torch.cat([x, y], -1), mode="r").R
    return r[..., :p], r[..., p:]


def make_problem(x: Tensor, y: Tensor, *, groups: Sequence[Tensor] | None = None, shared: bool = False) -> Problem:
    """The normalised form of ``(S, n, p)`` columns and ``(S, n, m)`` targets in float64.

    Args:
        x: columns of any finite scale; ridge is given as further rows.
        y: targets.
        groups: the columns of each group; None makes each column its own.
        shared: all outputs use the same columns: one target of width ``m`` instead of ``m`` of width 1.
    """
    x, y = reduce_rows(unit(x), y)
    basis = unit(x).unsqueeze(-1) if groups is None else _bases(x, groups)  # (S, q, G, g)
    targets = y.unsqueeze(2) if shared else y.unsqueeze(3)  # (S, q, O, w)
    padded = torch.nn.functional.pad(basis, (0, 0, 0, 1)).flatten(2)  # (S, q, (G + 1) g)
    samples, groups_and_one, width = len(x), basis.shape[2] + 1, basis.shape[3]
    gram = padded.mT @ padded
    gram.diagonal(dim1=-2, dim2=-1).add_(JITTER)
    moment = padded.mT @ targets.flatten(2)  # (S, (G + 1) g, O w)
    moment = moment.reshape(samples, -1, *targets.shape[2:]).transpose(1, 2).reshape(-1, groups_and_one, width, targets.shape[3])
    total = targets.square().sum((1, 3)).flatten()
    return Problem(basis, targets, gram.reshape(samples, groups_and_one, width, groups_and_one, width), moment, total)


def unit(x: Tensor) -> Tensor:
    """Columns of length 1; a column of zeros stays. Huge and tiny columns are brought into range first."""
    largest = x.abs().amax(-2, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)


def _bases(x: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """An orthonormal basis of the columns of each group, ``(S, q, G, g)``."""
    width = max(len(group) for group in groups)
    found = [span(x[..., group]) for group in groups]
    return torch.stack([torch.nn.functional.pad(basis, (0, width - basis.shape[-1])) for basis in found], 2)


def span(columns: Tensor) -> Tensor:
    """``(..., q, c)``: an orthonormal basis of the columns in the first places, zeros in those that their rank does not need."""
    u, s, _ = torch.linalg.svd(columns, full_matrices=False)
    least = max(columns.shape[-2:]) * torch.finfo(s.dtype).eps
    kept = s > least * s[..., :1]
    basis = u * kept.unsqueeze(-2)
    return torch.nn.functional.pad(basis, (0, columns.shape[-1] - basis.shape[-1]))
