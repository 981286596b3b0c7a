"""Which terms are in the equations? Supports recovered from noisy trajectories, by the protocol of Bertsimas & Gurnee (2023)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bench.applications import chaotic, rollouts
from bench.applications.cells import mean, options, run
from bench.applications.dynamics import DURATIONS, Samples, samples
from bench.applications.supports import ROWS, Grid, measure
from bench.common import Table, chosen, print_tables

RIDGES = (0.0, 1e-5, 1e-3, 0.01, 0.05, 0.2)
# The paper's grids, but for SR3 a tenth of it: one fit takes minutes on the largest library.
GRIDS = {
    "hopf": Grid(range(1, 6), RIDGES, np.logspace(-3, 0, 50), np.logspace(-3.5, 0.5, 10)),
    "lorenz": Grid(range(1, 6), RIDGES, np.logspace(-2, 1, 50), np.logspace(-1.5, 1.5, 10)),
    "mhd": Grid(range(1, 6), RIDGES, np.logspace(-1.5, 1.5, 50), np.logspace(-2, 2, 10)),
}
GRIDS["mhd-462"] = GRIDS["mhd"]
# Support accuracy and share of models that are exactly right, from the authors' raw results; not rerun.
PUBLISHED = {
    "hopf": {3.53: {"SSR": (0.38, 0.0), "MIOSR": (0.83, 0.22)}, 4.54: {"SSR": (0.48, 0.0), "MIOSR": (0.98, 0.88)},
             5.84: {"SSR": (0.59, 0.0), "MIOSR": (1.0, 1.0)}, 16.0: {"SSR": (0.74, 0.04), "MIOSR": (1.0, 1.0)}},
    "lorenz": {0.49: {"SSR": (0.77, 0.46), "MIOSR": (0.76, 0.18)}, 0.69: {"SSR": (0.93, 0.78), "MIOSR": (0.81, 0.32)},
               0.98: {"SSR": (0.99, 0.96), "MIOSR": (0.94, 0.70)}},
    "mhd": {0.5: {"SSR": (0.40, 0.06), "MIOSR": (0.90, 0.70)}, 1.29: {"SSR": (0.87, 0.64), "MIOSR": (0.99, 0.98)},
            16.0: {"SSR": (0.99, 0.98), "MIOSR": (1.0, 1.0)}},
}  # fmt: skip


def main(argv: list[str]) -> int:
    made = options("sindy", __doc__)
    tables_of = "the paper's systems, those of dysts, or few samples at unequal times"
    made.add_argument("--table", choices=["published", "chaotic", "rollouts"], default="published", help=tables_of)
    made.add_argument("--systems", help="comma separated, default all")
    made.add_argument("--validate", action="store_true", help="other seeds: for tuning")
    given = made.parse_args(argv)
    if given.table != "published":
        return {"chaotic": chaotic, "rollouts": rollouts}[given.table].main(given)
    names = chosen(given.systems, DURATIONS, ["hopf", "lorenz"] if given.quick else None)
    rows = chosen(given.rows, ROWS, ["khot", "ssr"] if given.quick else None)
    seeds = range(1000, 1000 + (given.seeds or 10)) if given.validate else range(1, 1 + (given.seeds or (1 if given.quick else 50)))
    cells = [
        {"flow": name, "duration": duration, "row": row, "seed": seed}
        for seed in seeds for row in rows for name in names for duration in DURATIONS[name][: 1 if given.quick else None]
    ]  # fmt: skip
    ROWS["khot"](samples("hopf", 3.53, 1), GRIDS["hopf"])  # imports are no part of the first time
    print_tables(tables([row for row in run("sindy", given, cells, _cell) if row["seed"] in seeds]))
    return 0


@functools.lru_cache(maxsize=32)
def _samples(system: str, duration: float, seed: int) -> Samples:
    return samples(system, duration, seed)


def _cell(flow: str, duration: float, row: str, seed: int) -> dict[str, Any]:
    data = _samples(flow, duration, seed)
    return measure(row, data, GRIDS[flow])


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    made = []
    for system in dict.fromkeys(row["flow"] for row in rows):
        mine = [row for row in rows if row["flow"] == system]
        times, names = (list(dict.fromkeys(row[key] for row in mine)) for key in ("duration", "row"))

        def cell(name: str, duration: float, mine: list[dict[str, Any]] = mine) -> str:
            found = [row for row in mine if row["row"] == name and row["duration"] == duration]
            if not found:
                return "-"
            exact = sum(row["exact"] for row in found) / len(found)
            seconds = sum(row["cpu_seconds"] for row in found) / len(found)
            return f"{mean((row['accuracy'] for row in found), 2)} / {exact:.2f} ({len(found)}; {seconds:.2g} s)"

        body = [[name, *(cell(name, duration) for duration in times)] for name in names]
        known = [
            [f"{name}, published", *("{:.2f} / {:.2f}".format(*PUBLISHED[system][duration][name]) for duration in times)]
            for name in ("SSR", "MIOSR")
            if system in PUBLISHED
        ]
        note = "support accuracy ± its standard error / share exactly right (seeds; seconds of the processor in a cell)"
        made.append(Table(f"{system}, recovered terms", ["row", *(f"T = {duration}" for duration in times)], body + known, note))
    return made
