"""What every method costs on many short rows, all in one run: the data of the page "Choosing a method"."""

from __future__ import annotations

from typing import Any

from bench import speed
from bench.common import RESULTS, Table, parser, same

SHAPE = "4096x64"  # the shape on which every method can be timed
PLAIN = ("--shapes", SHAPE, "--counts", "n/16", "--dists", "normal", "--dtypes", "float32", "--threads", "1", "--kernels", "on")
PATIENCE = ("--limit", "30", "--minutes", "10")  # seconds of one call, minutes in all: a slow method is timed too


def main(argv: list[str]) -> int:
    given = parser("choosing", __doc__).parse_args(argv)
    out = given.out or RESULTS / ("choosing-quick.jsonl" if given.quick else "choosing.jsonl")
    chosen = ["--methods", given.methods] if given.methods else []
    words = [*PLAIN, *PATIENCE, *chosen, "--seed", str(given.seed), "--out", str(out)]
    return speed.main([*words, *["--append"] * given.append, *["--quick"] * given.quick])


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Cheapest first."""
    found = {mode: {row["what"]: row["ratio"] for row in rows if same(row, kind="method", mode=mode)} for mode in speed.MODES}
    forward, both = found.values()
    body = [[name, f"{forward[name]:.2g}", f"{both[name]:.2g}"] for name in sorted(both, key=lambda name: both[name])]
    return [Table(f"cost in softmaxes, {SHAPE} normal scores, k = 4, one thread", ["", *found], body)]
