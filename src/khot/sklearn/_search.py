"""Exact nearest neighbours: FAISS where it is installed, chunks of distances otherwise."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MEMORY = 1 << 24  # distances in one chunk


class Found(NamedTuple):
    """Squared distances and indices, nearest first: ``(n_queries, k)`` each."""

    distances: Tensor
    indices: Tensor


def nearest(points: Tensor, query: Tensor, k: int, *, search: str = "auto") -> Found:
    """The ``k`` points nearest to every query, in squared Euclidean distance.

    Args:
        points: ``(N, dim)``.
        query: ``(M, dim)``.
        k: at most ``N``.
        search: ``"exact"`` in plain PyTorch, ``"faiss"``, or ``"auto"``: FAISS where it is installed.
    """
    middle = points.mean(0, keepdim=True)  # far from the origin the squares would cancel
    points, query = points - middle, query - middle
    if search == "faiss" or search == "auto" and importlib.util.find_spec("faiss") is not None:
        return _faiss(points, query, k)
    return _exact(points, query, k)


def _faiss(points: Tensor, query: Tensor, k: int) -> Found:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("search='faiss' needs FAISS: pip install faiss-cpu, or take search='exact'") from error
    index = faiss.IndexFlatL2(points.shape[1])
    index.add(np.ascontiguousarray(points.numpy(), dtype=np.float32))
    distances, indices = index.search(np.ascontiguousarray(query.numpy(), dtype=np.float32), k)
    return Found(torch.from_numpy(distances).to(points.dtype), torch.from_numpy(indices))


def _exact(points: Tensor, query: Tensor, k: int) -> Found:
    squares = points.square().sum(1)
    parts = []
    for rows in query.split(max(1, MEMORY // max(1, len(points)))):
        distance = rows.square().sum(1, keepdim=True) + squares - 2 * rows @ points.T
        parts.append(distance.clamp(min=0).topk(k, largest=False))
    if not parts:
        return Found(query.new_zeros(0, k), query.new_zeros(0, k, dtype=torch.long))
    return Found(*(torch.cat(part) for part in zip(*parts, strict=True)))
