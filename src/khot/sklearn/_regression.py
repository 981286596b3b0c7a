"""A table of columns and targets made ready for the search of the best columns, and the way back to coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from khot.subset import best_subsets, make_problem, reduce_rows

CONSTANT = 32 * np.finfo(np.float64).eps  # a centred column below this share of its values is the rounding of a constant


class Reduced(NamedTuple):
    """Centred, weighted, scaled, and rotated to at most ``p + m`` rows."""

    x: np.ndarray  # (q, p), largest entry of each column 1
    y: np.ndarray  # (q, m)
    mean_x: np.ndarray  # (p,)
    mean_y: np.ndarray  # (m,)
    scale: np.ndarray  # (p,), the unit of each column
    unit: float  # of the targets
    samples: float  # sum of the weights


class Fits(NamedTuple):
    """Least squares at every size: ``K`` sizes, ``m`` outputs, ``p`` columns."""

    support: np.ndarray  # (K, m, p) of bool
    coef: np.ndarray  # (K, m, p)
    intercept: np.ndarray  # (K, m)
    loss: np.ndarray  # (K, m), mean squared residual
    proven: np.ndarray  # (K, m) of bool


def reduce(x: np.ndarray, y: np.ndarray, weight: np.ndarray, intercept: bool) -> Reduced:
    """Weights go into the rows by their roots; with an intercept columns and targets lose their weighted means."""
    scale, unit = _largest(x, 0), float(_largest(y, None))
    x, y, samples = x / scale, y / unit, float(weight.sum())
    mean_x = np.average(x, axis=0, weights=weight) if intercept else np.zeros(x.shape[1])
    mean_y = np.average(y, axis=0, weights=weight) if intercept else np.zeros(y.shape[1])
    away_x, away_y = x - mean_x, y - mean_y
    if intercept:
        away_x, away_y = (away * (np.abs(away).max(0) > CONSTANT) for away in (away_x, away_y))
    root = np.sqrt(weight).reshape(-1, 1)
    few_x, few_y = reduce_rows(torch.from_numpy(root * away_x), torch.from_numpy(root * away_y))
    return Reduced(few_x.numpy(), few_y.numpy(), mean_x * scale, mean_y * unit, scale, unit, samples)


def _largest(values: np.ndarray, axis: int | None) -> np.ndarray:
    found = np.abs(values).max(axis=axis, initial=0.0)
    return np.where(found > 0, found, 1.0)


def fit_sizes(
    samples: Sequence[Reduced],
    sizes: Sequence[int],
    *,
    alphas: Sequence[float],
    groups: Sequence[np.ndarray] | None,
    shared: bool,
    starts: int,
    seed: int,
    nodes: int = 0,
) -> list[Fits]:
    """The best columns of every size and output, for each sample of rows and its ridge in ``alphas``, all in one search."""
    ridges = [_with_ridge(sample, alpha, rows=any(alphas)) for sample, alpha in zip(samples, alphas, strict=True)]
    x = torch.stack([torch.from_numpy(columns) for columns in ridges])
    y = torch.stack([torch.from_numpy(np.pad(sample.y, ((0, x.shape[1] - len(sample.y)), (0, 0)))) for sample in samples])
    parts = None if groups is None else [torch.from_numpy(group) for group in groups]
    problem = make_problem(x, y, groups=parts, shared=shared)
    masks, _, proven = best_subsets(problem, sizes, num_starts=starts, seed=seed, nodes=nodes)  # (K, S O, G)
    outputs = y.shape[2]
    columns = masks.numpy() if groups is None else _columns(masks.numpy(), groups, x.shape[2])
    split = columns.reshape(len(sizes), len(samples), -1, x.shape[2]).transpose(1, 0, 2, 3)
    sure = proven.numpy().reshape(len(sizes), len(samples), -1).transpose(1, 0, 2)
    wide = (len(samples), len(sizes), outputs)
    split, sure = np.broadcast_to(split, (*wide, x.shape[2])), np.broadcast_to(sure, wide)
    return [_solve(sample, columns, chosen, known) for sample, columns, chosen, known in zip(samples, ridges, split, sure, strict=True)]


def _with_ridge(sample: Reduced, alpha: float, *, rows: bool) -> np.ndarray:
    """The columns with the ridge as further ``rows``, whose targets are 0."""
    return np.concatenate([sample.x, np.diag(np.sqrt(alpha) / sample.scale)]) if rows else sample.x


def _columns(masks: np.ndarray, groups: Sequence[np.ndarray], p: int) -> np.ndarray:
    """From chosen groups to chosen columns."""
    found = np.zeros((*masks.shape[:2], p), dtype=bool)
    for place, group in enumerate(groups):
        found[..., group] = masks[..., place, None]
    return found


def _solve(sample: Reduced, x: np.ndarray, support: np.ndarray, proven: np.ndarray) -> Fits:
    """Plain least squares on each support, ``(K, m, p)``; ``x`` are the columns, with the ridge below."""
    m = sample.y.shape[1]
    y = np.pad(sample.y, ((0, len(x) - len(sample.y)), (0, 0)))
    coef, loss = np.zeros(support.shape), np.zeros(support.shape[:2])
    for place in np.ndindex(*support.shape[:2]):
        chosen, target = support[place], y[:, place[1]]
        coef[place][chosen] = np.linalg.lstsq(x[:, chosen], target, rcond=None)[0]
        loss[place] = np.square(sample.y[:, place[1]] - sample.x @ coef[place]).sum()
    coef = coef * (sample.unit / sample.scale)
    intercept = sample.mean_y.reshape(1, m) - coef @ sample.mean_x
    return Fits(support, coef, intercept, loss * sample.unit**2 / max(sample.samples, 1e-300), proven)
