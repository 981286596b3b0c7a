"""What models are trained with: hard, gathered and sampled selection, ranks and every method, each beside what it replaces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.common import Recorder, Table, draw_scores, parser, print_tables, progress, race, recorder
from bench.timing import gradient_of, memory_limit
from bench.verbs_before import before_rows
from bench.verbs_claims import CLAIMS, Claim, shape_name


def main(argv: list[str]) -> int:
    return run(options_parser().parse_args(argv))


def options_parser() -> argparse.ArgumentParser:
    options = parser("verbs", __doc__)
    options.add_argument("--only", help="comma separated beginnings of claims, e.g. 'topk_mask,sample'")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--before", metavar="COMMIT", help="also time the slow calls of an earlier commit, in turns with today's")
    options.add_argument("--tree", type=Path, help="a working tree of that commit with its native library built, instead of a new one")
    options.add_argument("--gigabytes", type=float, default=16.0, help="memory that may be used")
    return options


def run(options: argparse.Namespace) -> int:
    record = recorder("verbs", options)
    torch.set_num_threads(options.threads)
    wanted = [
        claim for claim in CLAIMS if options.only is None or any(word and claim.what.startswith(word) for word in options.only.split(","))
    ]
    cells = [(claim, shape) for claim in wanted for shape in (claim.shapes[:1] if options.quick else claim.shapes)]
    with memory_limit(options.gigabytes):
        for claim, shape in progress(cells, "verbs"):
            _time(claim, shape, options, record)
    if options.before:
        before_rows(options.before, record, options.tree)
    print_tables(tables(record.rows))
    return 0


def _time(claim: Claim, shape: tuple[int, int, int], options: argparse.Namespace, record: Recorder) -> None:
    facts = {"what": claim.what, "over": claim.over, "mode": claim.mode, "shape": shape_name(shape), "bound": claim.bound(shape)}
    if missing := claim.missing():
        record.add(**facts, skipped=missing)
        return
    batch, n, k = shape
    x = draw_scores("normal", (batch, n), seed=options.seed)
    functions = {"base": claim.base(batch, n, k), "ours": claim.call(batch, n, k)}
    calls = {name: (lambda f=f: f(x)) if claim.mode == "forward" else gradient_of(f, x) for name, f in functions.items()}
    effort: dict[str, Any] = {"seconds": 0.04, "rounds": (3, 20), "patience": 0.4} if options.quick else {"seconds": 0.3, "patience": 6.0}
    times = race(calls, **effort)
    record.add(**facts, **times["ours"].row(), base=times["base"].median, ratio=times["ours"].ratio(times["base"]), threads=options.threads)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Every claim beside what was measured, a column for each instruction set."""
    sets = list(dict.fromkeys(kernel_of(row) for row in rows))
    found = {(_claim(row), kernel_of(row)): _measured(row) for row in rows}
    lines = [[*claim, *(found.get((claim, kernel), "") for kernel in sets)] for claim in dict.fromkeys(_claim(row) for row in rows)]
    head = ["call", "mode", "over", "shape (batch, n, k)", "bound", *(f"measured, {kernel}" for kernel in sets)]
    return [Table("time over that of what it replaces, in the same run", head, lines)]


def kernel_of(row: dict[str, Any]) -> str:
    """The instruction set that a row was measured with. Earlier rows have only that of PyTorch, which was the same."""
    return row.get("kernel") or row["isa"].lower()


def _claim(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["what"], row["mode"], row["over"], row["shape"], f"<= {row['bound']:g}")


def _measured(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f}" if "ratio" in row else row["skipped"]
