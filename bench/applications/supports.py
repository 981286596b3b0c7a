"""Methods that find the terms of equations, each tried on a grid and chosen on held-out samples."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench.applications.dynamics import Samples


class Grid(NamedTuple):
    """What the methods are tried with; the held-out part chooses."""

    sizes: range
    ridges: tuple[float, ...]
    thresholds: np.ndarray
    relaxed: np.ndarray  # thresholds of SR3
    scaled: tuple[bool, ...] = (False,)  # whether pysindy normalises columns


Row = Callable[[Samples, Grid], np.ndarray]  # coefficients, (d, p)


def akaike(data: Samples, coef: np.ndarray, *, apart: bool) -> np.ndarray:
    """On the held-out part, corrected for its size: for each equation apart, or for all together.

    As in the paper's code the terms of all equations count, also for the error of one.
    """
    away, terms = np.square(data.held_slope - data.held_library @ coef.T), np.count_nonzero(coef)
    loss, n = (away.sum(0), len(away)) if apart else (away.sum(), away.size)
    return n * np.log(np.maximum(loss, 1e-300) / n) + 2.0 * terms + 2.0 * (terms + 1) * (terms + 2) / max(n - terms - 2, 1)


def best_of(data: Samples, found: list[np.ndarray], *, apart: bool) -> np.ndarray:
    values = np.stack([np.broadcast_to(akaike(data, coef, apart=apart), (len(coef),)) for coef in found])
    best = values.argmin(0)
    return np.stack(found)[best, np.arange(len(best))]


def exchanges(data: Samples, grid: Grid) -> np.ndarray:
    """The protocol: columns from the first part, their number by Akaike's criterion on the held-out part, for each equation."""
    return best_of(data, list(_path(grid.sizes, data.library, data.slope)), apart=True)


def exchanges_ridge(data: Samples, grid: Grid) -> np.ndarray:
    """The same with the paper's six values of ridge; as there, the coefficients are those of plain least squares."""
    found = _path(grid.sizes, data.library, data.slope, grid.ridges)
    return best_of(data, [refitted(coef != 0, data) for coef in found], apart=True)


def exchanges_all(data: Samples, grid: Grid) -> np.ndarray:
    """The number of columns by the protocol, then the columns themselves from both parts."""
    terms = np.count_nonzero(exchanges(data, grid), axis=1)
    both = np.concatenate([data.library, data.held_library]), np.concatenate([data.slope, data.held_slope])
    coef = np.zeros(data.truth.shape)
    for size in np.unique(terms):
        coef[terms == size] = _path(range(size, size + 1), both[0], both[1][:, terms == size])[0]
    return coef


def _path(sizes: range, library: np.ndarray, slope: np.ndarray, alpha: float | tuple[float, ...] = 0.0) -> np.ndarray:
    """Coefficients of the best columns of each size, ``(sizes, d, p)``; with several ridges for each of them."""
    from khot.sklearn import TopKRegressor

    return TopKRegressor(sizes, alpha=alpha, fit_intercept=False, random_state=0).fit(library, slope).path_.coef


def exchanges_validation(data: Samples, grid: Grid) -> np.ndarray:
    """The estimator's own way, in one call: size and ridge by the held-out part, the columns themselves from both parts."""
    from khot.sklearn import TopKRegressor

    both = np.concatenate([data.library, data.held_library]), np.concatenate([data.slope, data.held_slope])
    split = np.split(np.arange(len(both[0])), [len(data.library)])
    made = TopKRegressor(grid.sizes, alpha=grid.ridges, criterion="validation", cv=[split], fit_intercept=False, random_state=0)
    return made.fit(*both).coef_


def exchanges_elbow(data: Samples, grid: Grid) -> np.ndarray:
    """Columns from both parts, their number by the elbow of the loss, without validation."""
    from khot.sklearn import TopKRegressor

    both = np.concatenate([data.library, data.held_library]), np.concatenate([data.slope, data.held_slope])
    return TopKRegressor(grid.sizes, criterion="elbow", fit_intercept=False, random_state=0).fit(*both).coef_


def stlsq(data: Samples, grid: Grid) -> np.ndarray:
    import pysindy

    tried = itertools.product(grid.thresholds, grid.ridges, grid.scaled)
    return best_of(data, [fitted(pysindy.STLSQ(threshold=t, alpha=a, normalize_columns=n), data) for t, a, n in tried], apart=False)


def sr3(data: Samples, grid: Grid) -> np.ndarray:
    import pysindy

    found = []
    for threshold, nu, scaled in itertools.product(grid.relaxed, (1 / 30, 1 / 3, 10 / 3), grid.scaled):
        weight = threshold**2 / (2 * nu)
        model = pysindy.SR3(reg_weight_lam=weight, relax_coeff_nu=nu, max_iter=1000, normalize_columns=scaled, unbias=True)
        found.append(fitted(model, data))
    return best_of(data, found, apart=False)


def ssr(data: Samples, grid: Grid) -> np.ndarray:
    return best_of(data, _stepwise(data, grid), apart=True)


def ssr_elbow(data: Samples, grid: Grid) -> np.ndarray:
    """SSR's own columns of every size, the best of its grid by the loss, and their number by the same elbow as ours."""
    from khot.sklearn._criteria import elbow

    found = np.stack(_stepwise(data, grid))
    terms, loss = np.count_nonzero(found, axis=2), np.square(data.slope - np.einsum("np,kdp->knd", data.library, found)).sum(1)
    coef = np.zeros(found.shape[1:])
    for equation in range(len(coef)):
        best = [_least(found[:, equation], loss[:, equation], terms[:, equation] == size) for size in grid.sizes]
        path = np.array([value for value, _ in best])[:, None]
        coef[equation] = best[int(elbow(path, np.square(data.slope[:, [equation]]).sum(0), np.array(grid.sizes)).argmin())][1]
    return coef


def _least(coef: np.ndarray, loss: np.ndarray, among: np.ndarray) -> tuple[float, np.ndarray]:
    where = np.flatnonzero(among)
    return min(((float(loss[i]), coef[i]) for i in where), key=lambda pair: pair[0], default=(np.inf, np.zeros(coef.shape[1])))


def _stepwise(data: Samples, grid: Grid) -> list[np.ndarray]:
    import pysindy

    found: list[np.ndarray] = []
    for alpha, scaled in itertools.product(grid.ridges, grid.scaled):
        model = pysindy.SSR(alpha=alpha, max_iter=data.library.shape[1] - 1, normalize_columns=scaled)
        fitted(model, data)
        found += [refitted(np.array(coef) != 0, data) if scaled else np.array(coef) for coef in model.history_]
    return found


def fitted(optimizer: Any, data: Samples) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that did not converge or that left nothing; they are scored as they are
        try:
            return np.array(optimizer.fit(data.library, data.slope).coef_)
        except (ValueError, np.linalg.LinAlgError):  # its numbers grew beyond all bounds: it found nothing
            return np.zeros(data.truth.shape)


def refitted(support: np.ndarray, data: Samples) -> np.ndarray:
    """Least squares on each equation's columns."""
    coef = np.zeros(support.shape)
    for equation, columns in enumerate(support):
        coef[equation, columns] = np.linalg.lstsq(data.library[:, columns], data.slope[:, equation], rcond=None)[0]
    return coef


def score(found: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Right terms over all that are right or found, and whether the model is exactly right."""
    return {"accuracy": float((found & truth).sum() / (found | truth).sum()), "exact": float((found == truth).all())}


def measure(row: str, data: Samples, grid: Grid) -> dict[str, float]:
    """One cell: the scores and the time of the wall and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    coef = ROWS[row](data, grid)
    return {**score(coef != 0, data.truth), "fit_seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}


ROWS: dict[str, Row] = {
    "khot": exchanges, "khot-ridge": exchanges_ridge, "khot-all": exchanges_all, "khot-validation": exchanges_validation,
    "khot-elbow": exchanges_elbow, "ssr": ssr, "ssr-elbow": ssr_elbow, "stlsq": stlsq, "sr3": sr3,
}  # fmt: skip
