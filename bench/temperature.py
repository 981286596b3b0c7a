"""Which tau: the temperature at which each method is as far from the hard top-k as is asked for, from the quality data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from bench.show import Table

GAPS = (0.3, 0.1, 0.03)  # half the l1 distance to the hard mask, over k


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """One row per method: tau at each gap, and its tau at the middle gap over the sigmoid's."""
    curves = {
        what: curve(row for row in rows if row["what"] == what) for what in dict.fromkeys(row["what"] for row in rows if "tau" in row)
    }
    middle = GAPS[1]
    unit = crossing(curves["sigmoid"], middle) if "sigmoid" in curves else None
    lines = [
        [what, *(_show(crossing(line, gap)) for gap in GAPS), _over(crossing(line, middle), unit)] for what, line in sorted(curves.items())
    ]
    title = f"tau at which the mask is this far from the hard top-k (n = {rows[0]['n']}, k = {rows[0]['k']}, normal scores)"
    return [Table(title, ["", *(f"gap {gap:g}" for gap in GAPS), f"over sigmoid's, gap {middle:g}"], lines)]


def curve(rows: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """(tau, gap) from the smallest tau up."""
    return sorted((row["tau"], row["distance"]) for row in rows if "tau" in row)


def crossing(line: list[tuple[float, float]], gap: float) -> float | None:
    """The first tau at which the gap is reached, between two measured ones on a logarithmic scale; ``None`` if it never is."""
    for (tau, low), (after, high) in itertools.pairwise(line):
        if low < gap <= high:
            return math.exp(math.log(tau) + (gap - low) / (high - low) * math.log(after / tau))
    return None


def _show(tau: float | None) -> str:
    return "never" if tau is None else f"{tau:.2g}" if tau < 100 else f"{tau:.0f}"


def _over(tau: float | None, unit: float | None) -> str:
    return "" if tau is None or unit is None else _show(tau / unit)
