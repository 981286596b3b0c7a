"""Terms from few samples at unequal times: least squares on differences, and terms chosen by the gradient of a rollout."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench.applications.cells import run
from bench.common import Table, chosen, print_tables

ROWS = {"differences": 0, "rollout": 120}  # training steps
TRAJECTORIES, SAMPLES, NOISE = 4, 25, 0.01


class Flow(NamedTuple):
    """A right-hand side, the range of the starting points, the mean distance of two samples, the terms that are right."""

    field: Callable[[float, np.ndarray], list[float]]
    start: tuple[float, float]
    gap: float
    terms: list[set[str]]


FLOWS = {
    "van der Pol": Flow(lambda t, x: [x[1], (1 - x[0] ** 2) * x[1] - x[0]], (0.5, 2.0), 1.0, [{"y"}, {"x", "y", "x^2 y"}]),
    "Lotka-Volterra": Flow(lambda t, x: [x[0] - x[0] * x[1], x[0] * x[1] - x[1]], (0.5, 2.0), 1.0, [{"x", "x y"}, {"x y", "y"}]),
    "Duffing": Flow(lambda t, x: [x[1], x[0] - x[0] ** 3 - 0.1 * x[1]], (0.5, 2.0), 0.8, [{"y"}, {"x", "x^3", "y"}]),
}


def main(given: argparse.Namespace) -> int:
    """The rows get the samples and the numbers of terms; the library holds all ten polynomials up to degree 3."""
    rows, flows = chosen(given.rows, ROWS), chosen(given.systems, FLOWS, ["van der Pol"] if given.quick else None)
    first = 1000 if given.validate else 100
    seeds = range(first, first + (given.seeds or (1 if given.quick else 10)))
    cells = [{"flow": flow, "row": row, "seed": seed} for seed in seeds for flow in flows for row in rows]
    print_tables(tables([row for row in run("rollouts", given, cells, _cell) if row["seed"] in seeds]))
    return 0


def samples(flow: Flow, seed: int) -> tuple[list[Any], list[Any]]:
    import torch
    from scipy.integrate import solve_ivp

    random, xs, ts = np.random.RandomState(seed), [], []
    for _ in range(TRAJECTORIES):
        t = np.cumsum(flow.gap * random.uniform(0.3, 1.7, SAMPLES))
        x = solve_ivp(flow.field, (0, t[-1]), random.uniform(*flow.start, 2), t_eval=t, rtol=1e-9, atol=1e-9).y.T
        xs.append(torch.from_numpy(x + NOISE * x.std(0) * random.normal(size=x.shape)))
        ts.append(torch.from_numpy(t))
    return xs, ts


def _cell(flow: str, row: str, seed: int) -> dict[str, Any]:
    import khot

    truth = FLOWS[flow].terms
    model = khot.nn.SINDy(khot.nn.PolynomialLibrary(dim=2, degree=3), dim=2, k=[len(terms) for terms in truth])
    model.fit(*samples(FLOWS[flow], seed), steps=ROWS[row], substeps=3)
    names = model.library.names(model.variables)
    found = [{name for name, on in zip(names, line, strict=True) if on} for line in model.mask]
    return {"exact": float(found == truth), "equations": model.equations()}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    kinds, flows = (list(dict.fromkeys(row[key] for row in rows)) for key in ("row", "flow"))

    def cell(kind: str, flow: str) -> str:
        mine = [row for row in rows if (row["row"], row["flow"]) == (kind, flow)]
        return f"{sum(row['exact'] for row in mine):.0f} of {len(mine)}"

    body = [[kind, *(cell(kind, flow) for flow in flows)] for kind in kinds]
    note = f"{TRAJECTORIES} trajectories of {SAMPLES} samples at unequal times, {NOISE:.0%} noise, ten candidate terms"
    return [Table("seeds with the right terms", ["row", *flows], body, note)] if rows else []
