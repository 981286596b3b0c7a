"""Our nCCS and seconds beside the published ones."""

from __future__ import annotations

import statistics
from typing import Any

from bench import published
from bench.common import print_table, same

CELLS = 85  # of the published experiment


def report(rows: list[dict[str, Any]]) -> None:
    """Our nCCS beside the published one, and what follows from it."""
    for method in published.NCCS:
        mine = {(row["n"], row["k"]): row for row in rows if same(row, what=method, setting="published")}
        best = {(row["n"], row["k"]): row for row in rows if same(row, what=method, setting="best")}
        if not mine:
            continue
        lines = [
            [n, k, f"{value:.3f}", f"{mine[n, k]['nccs']:.3f}", f"{best[n, k]['nccs']:.3f}", f"{best[n, k]['options']}"]
            for (n, k), value in published.NCCS[method].items()
            if (n, k) in mine
        ]
        if lines:
            print_table(f"{method}: nCCS", ["n", "k", "published", "ours", "best setting", "which"], lines)
        print("  ".join(f"{key} {value}" for key, value in summary(rows, method).items()))
    _versus(rows)


def summary(rows: list[dict[str, Any]], method: str) -> dict[str, Any]:
    """Deviation from the published figures of one method."""
    mine = {(row["n"], row["k"]): row["nccs"] for row in rows if same(row, what=method, setting="published")}
    gaps = [abs(mine[cell] - value) for cell, value in published.NCCS[method].items() if cell in mine]
    found = {"cells": len(mine), "published cells": len(gaps)}
    if gaps:
        found["mean absolute deviation"] = round(statistics.fmean(gaps), 4)
    if len(mine) == CELLS:
        mean = statistics.fmean(mine.values())
        found |= {
            "mean": round(mean, 4),
            "published mean": published.MEAN[method],
            "apart by": round(abs(mean - published.MEAN[method]), 4),
        }
    return found


def _versus(rows: list[dict[str, Any]]) -> None:
    times = {(row["what"], row["n"], row["k"]): row["seconds"] for row in rows if row.get("setting") == "published"}
    cells = [(n, k) for what, n, k in times if what == "halving" and ("iterative", n, k) in times]
    ratios = {(n, k): times["iterative", n, k] / times["halving", n, k] for n, k in cells}
    if ratios:
        (n, k), least = min(((cell, r) for cell, r in ratios.items() if cell[1] >= 8), key=lambda pair: pair[1], default=((0, 0), 0.0))
        top = max(ratios, key=lambda cell: (cell[0] * cell[1], cell))
        print(f"halving is {ratios[top]:.1f} times faster than iterative at n, k = {top}; for k >= 8 the least is {least:.2f}, at {(n, k)}")
