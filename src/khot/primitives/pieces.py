"""Matrices whose rows are made in pieces that stay in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import is_recorded

PIECE = 1 << 20  # entries of a (rows, n) block that are worked on at once


def pieces(scores: Tensor, k: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of a block small enough to stay in cache."""
    step = k if is_recorded() else max(1, PIECE // max(1, scores.numel()))  # a graph must not depend on the length of the rows
    for start in range(0, k, max(step, 1)):
        yield start, min(k, start + step)


def mask_by_rows(rows: Callable[[int, int], Tensor], scores: Tensor, k: int, among: Among | None = None) -> Tensor:
    """The sum of the rows of a matrix that is made in pieces; only a gradient keeps them all."""
    total = torch.zeros_like(scores)
    for start, stop in pieces(scores, k):
        part = rows(start, stop)
        total = total + (part if among is None else torch.where(among.wanted(stop - start, start), part, 0.0)).sum(-2)
    return total


def select_by_rows(rows: Callable[[int, int], Tensor], x: Tensor, scores: Tensor, k: int) -> Tensor:
    """``matrix @ x`` for a matrix that is made in pieces."""
    parts = [rows(start, stop) @ x for start, stop in pieces(scores, k)]
    return torch.cat(parts, -2) if parts else x[..., :0, :]
