"""The polynomial systems of the package ``dysts``, at several levels of noise: how many are recovered exactly."""

from __future__ import annotations

import argparse
import functools
import warnings
from typing import Any

import numpy as np

from bench.applications.cells import run
from bench.applications.dynamics import Samples, exponents, monomials
from bench.applications.supports import ROWS, Grid, measure
from bench.common import Table, chosen, print_tables

DEGREE, PERIODS, POINTS = 4, 20, 200  # of the library; length and samples a period of each trajectory
NOISES = {0.0: 5, 0.01: 21, 0.05: 41}  # share of each coordinate's deviation, and the window that smooths it
GRID = Grid(range(1, 11), (0.0, 0.05), np.logspace(-3, 1, 20), np.logspace(-3, 1, 8), scaled=(False, True))


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that numba is not there
            from dysts import flows, systems
    except ImportError as error:
        raise SystemExit("the systems are in a package: pip install dysts") from error
    return flows, systems


@functools.cache
def terms(name: str) -> np.ndarray | None:
    """The coefficients ``(d, p)`` of a polynomial right-hand side without time, found on random points; None for any other."""
    flows, _ = _package()
    model = getattr(flows, name)()
    start = np.asarray(model.ic, dtype=np.float64)
    if start.ndim != 1 or not 2 <= len(start) <= 5:
        return None
    points = start * np.random.RandomState(0).uniform(0.5, 1.5, (600, len(start))) + np.random.RandomState(1).normal(size=(600, len(start)))
    try:
        slope = np.array([model.rhs(point, 0.0) for point in points], dtype=np.float64)
        later = np.array([model.rhs(point, 1.7) for point in points], dtype=np.float64)
    except (ValueError, ZeroDivisionError, TypeError, OverflowError):
        return None
    library = monomials(points, DEGREE)
    scale = np.abs(library).max(0)
    coef = np.linalg.lstsq(library / scale, slope, rcond=1e-14)[0].T / scale
    size = np.abs(slope).max(0)
    right = np.abs(library @ coef.T - slope).max(0) <= 1e-9 * size
    if not np.isfinite(slope).all() or not right.all() or not np.array_equal(slope, later):
        return None
    return np.where(np.abs(coef) * scale > 1e-7 * size[:, None], coef, 0.0)


def names() -> list[str]:
    _, systems = _package()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [name for name in systems.get_attractor_list() if terms(name) is not None]


def unseen() -> list[str]:
    """Without every sixth: on those the share in the elbow criterion was chosen."""
    return [name for place, name in enumerate(names()) if place % 6]


@functools.lru_cache(maxsize=8)
def trajectory(name: str) -> tuple[np.ndarray, float]:
    """``PERIODS`` periods from a point on the attractor, by the recovered polynomial, and the step."""
    from scipy.integrate import solve_ivp

    flows, _ = _package()
    model, coef = getattr(flows, name)(), terms(name)
    assert coef is not None
    used = np.flatnonzero(coef.any(0))
    powers, small = exponents(coef.shape[0], DEGREE)[used], coef[:, used]

    def field(t: float, x: np.ndarray) -> np.ndarray:
        return small @ (x**powers).prod(1)

    times = np.linspace(0, PERIODS * model.period, PERIODS * POINTS + 1)
    done = solve_ivp(field, (0.0, times[-1]), np.asarray(model.ic, dtype=np.float64), t_eval=times, method="LSODA", rtol=1e-11, atol=1e-13)
    return done.y.T, times[1]


@functools.lru_cache(maxsize=8)
def samples(name: str, noise: float, seed: int) -> Samples:
    """Smoothed values and derivatives by local cubics; two thirds to fit, the last third to choose by, without what lies near the ends."""
    from scipy.signal import savgol_filter

    x, step = trajectory(name)
    x = x + noise * x.std(0) * np.random.RandomState(seed).normal(size=x.shape)
    unit = x.std(0)
    window = NOISES[noise]
    smooth, slope = (savgol_filter(x / unit, window, 4 if window > 5 else 3, deriv=d, delta=step, axis=0) for d in (0, 1))
    inner = slice(window // 2, -(window // 2))
    library, slope = monomials(smooth[inner], DEGREE), slope[inner]
    cut, truth = len(slope) * 2 // 3, terms(name)
    assert truth is not None
    return Samples(library[:cut], slope[:cut], library[cut:], slope[cut:], truth != 0)


def main(given: argparse.Namespace) -> int:
    rows = chosen(
        given.rows, ROWS, ["khot-elbow", "stlsq"] if given.quick else ["khot-elbow", "khot-all", "ssr", "ssr-elbow", "stlsq", "sr3"]
    )
    systems = given.systems.split(",") if given.systems else ["Lorenz", "Rossler"] if given.quick else unseen()
    seeds = range(1000, 1000 + (given.seeds or 1)) if given.validate else range(given.seeds or 1)
    cells = [
        {"flow": system, "noise": noise, "row": row, "seed": seed}
        for seed in seeds for system in systems for noise in NOISES for row in rows
    ]  # fmt: skip
    print_tables(tables([row for row in run("chaotic", given, cells, _cell) if row["seed"] in seeds]))
    return 0


def _cell(flow: str, noise: float, row: str, seed: int) -> dict[str, Any]:
    return measure(row, samples(flow, noise, seed), GRID)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Systems that are exactly right, and the mean support accuracy, over those that every row has finished."""
    return [_table(rows)] if rows else []


def _table(rows: list[dict[str, Any]]) -> Table:
    kinds, noises, systems = (list(dict.fromkeys(row[key] for row in rows)) for key in ("row", "noise", "flow"))
    whole = [name for name in systems if sum(row["flow"] == name for row in rows) >= len(kinds) * len(noises)]
    rows = [row for row in rows if row["flow"] in whole]

    def cell(kind: str, noise: float) -> str:
        mine = [row for row in rows if row["row"] == kind and row["noise"] == noise]
        return f"{sum(row['exact'] for row in mine):.0f} of {len(mine)} ({sum(row['accuracy'] for row in mine) / max(1, len(mine)):.2f})"

    body = [[kind, *(cell(kind, noise) for noise in noises)] for kind in kinds]
    note = "systems that are exactly right (mean support accuracy)"
    return Table("polynomial systems of dysts", ["row", *(f"noise {noise:.0%}" for noise in noises)], body, note)
