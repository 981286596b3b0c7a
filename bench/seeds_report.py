"""Our nCCS and seconds beside the published ones."""

from __future__ import annotations

import statistics
from typing import Any

from bench import published
from bench.common import Table, same

CELLS = 85  # of the published experiment


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Our nCCS beside the published one, and the seconds of both methods."""
    done = {row["what"] for row in rows if row.get("setting") == "published"}
    return [_nccs(rows, method) for method in published.NCCS if method in done] + _versus(rows)


def _nccs(rows: list[dict[str, Any]], method: str) -> Table:
    mine, best = ({(row["n"], row["k"]): row for row in rows if same(row, what=method, setting=s)} for s in ("published", "best"))
    lines = [
        [n, k, f"{value:.3f}", f"{mine[n, k]['nccs']:.3f}", f"{best[n, k]['nccs']:.3f}", _options(best[n, k])]
        for (n, k), value in published.NCCS[method].items()
        if (n, k) in mine
    ]
    note = "; ".join(f"{key} {value}" for key, value in summary(rows, method).items())
    return Table(f"{method}: nCCS", ["n", "k", "published", "ours", "best setting", "which"], lines, note)


def _options(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in row["options"].items())


def summary(rows: list[dict[str, Any]], method: str) -> dict[str, Any]:
    """Deviation from the published figures of one method."""
    mine = {(row["n"], row["k"]): row["nccs"] for row in rows if same(row, what=method, setting="published")}
    gaps = [abs(mine[cell] - value) for cell, value in published.NCCS[method].items() if cell in mine]
    items = sorted({row["items"] for row in rows if same(row, what=method, setting="published")})
    found: dict[str, Any] = {"items a cell": " to ".join(str(i) for i in dict.fromkeys([*items[:1], *items[-1:]]))}
    found |= {"cells": len(mine), "published cells at hand": len(gaps)}
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


def times_faster(rows: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Iterative's seconds over halving's in the same run, by n and k."""
    times = _seconds(rows)
    cells = [(n, k) for what, n, k in times if what == "halving" and ("iterative", n, k) in times]
    return {(n, k): times["iterative", n, k] / times["halving", n, k] for n, k in cells}


def _seconds(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    return {(row["what"], row["n"], row["k"]): row["seconds"] for row in rows if row.get("setting") == "published" and "seconds" in row}


def _versus(rows: list[dict[str, Any]]) -> list[Table]:
    """Halving against iterative, timed in the same run."""
    times, ratios = _seconds(rows), times_faster(rows)
    if not ratios:
        return []
    least = min((cell for cell in ratios if cell[1] >= 8), key=lambda cell: ratios[cell], default=next(iter(ratios)))
    note = f"For k >= 8 halving is at least {ratios[least]:.2f} times as fast as iterative; the least is at n, k = {least}."
    shown = [cell for cell in ratios if cell[0] == max(n for n, _ in ratios)]
    lines = [[n, k, f"{times['halving', n, k]:.4f}", f"{times['iterative', n, k]:.4f}", f"{ratios[n, k]:.1f}"] for n, k in shown]
    return [Table("seconds a batch of 16", ["n", "k", "halving", "iterative", "times faster"], lines, note)]
