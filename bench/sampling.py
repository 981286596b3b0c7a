"""Time and memory of every sampling design, beside torch's own sort, random numbers and cumulative sum in the same run."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.common import Recorder, Table, affordable, chosen, draw_scores, parser, print_tables, progress, race, recorder, same
from bench.memory import RESET, peak

FIXED_ORDER = {"systematic, fixed order": ("systematic", "fixed"), "pivotal, fixed order": ("pivotal", "fixed")}
LIMITS = {  # what, beside what, at most how many times its time, at one row of 10^6
    "systematic, fixed order": ("rand + cumsum", 4.0),
    "systematic": ("sort", 1.5),
    "pareto": ("sort", 1.5),
    "pivotal": ("sort", 4.0),
}
BATCH, N, K = 64, 1024, 32  # of the comparison with the plain recursion
LOOP, TREE, CALIBRATED = "plain loop", "KSubset", "KSubset, calibrated"


def main(argv: list[str]) -> int:
    options = parser("sampling", __doc__)
    options.add_argument("--limit", type=float, help="seconds a call may take, else the design is skipped (3; 0.5 with --quick)")
    options.add_argument("--part", choices=("all", "time", "memory"), default="all")
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    record = recorder("sampling", given)
    for n in progress([10**p for p in range(2, 5 if given.quick else 7)] + ([10**6] if given.quick else []), f"sampling, {given.part}"):
        _memory(n, record, given) if given.part == "memory" else _times(n, record, given)
    if given.part != "memory":
        _recursion(record, given)
    if given.part == "all" and RESET.exists():
        _memory_apart(argv, record)
        record = Recorder("sampling", record.path, append=True)
    if given.part != "memory":
        print_tables(tables(record.rows))
    return 0


def _memory_apart(argv: list[str], record: Recorder) -> None:
    """In a process that gives freed memory back at once, else what is kept for later would hide the peak."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "bench", "sampling", *argv, "--append", "--out", str(record.path), "--part", "memory"]
    subprocess.run(command, env=env, check=True)


def _draws(given: argparse.Namespace) -> dict[str, Callable[[Tensor], Tensor]]:
    import khot

    names = chosen(given.methods, khot.DESIGNS)
    plain = {name: functools.partial(khot.sample, design=name) for name in names}
    fixed = {
        label: functools.partial(khot.sample, design=name, order=order) for label, (name, order) in FIXED_ORDER.items() if name in names
    }
    return {**plain, **fixed}


def _probs(batch: int, n: int) -> Tensor:
    import khot

    return khot.soft_topk(draw_scores("normal", (batch, n)), max(1, n // 16))


def _affordable(n: int, record: Recorder, given: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    """The designs that one can wait for at this size, ready to draw from one row with k = n/16."""
    limit, probs, calls = given.limit or (0.5 if given.quick else 3.0), _probs(1, n), {}
    for name, draw in _draws(given).items():
        reason = affordable(lambda b, m, draw=draw: draw(_probs(b, m)), 1, n, limit=limit)
        if reason is None:
            calls[name] = functools.partial(draw, probs)
        elif given.part != "memory":
            record.add(what=name, n=n, skipped=reason)
    return calls


def _times(n: int, record: Recorder, given: argparse.Namespace) -> None:
    keys = torch.rand(1, n)
    bases: dict[str, Callable[[], Tensor]] = {
        "sort": lambda: keys.sort(-1).values,
        "rand + cumsum": lambda: torch.rand(1, n).cumsum(-1),
    }
    timings = race({**bases, **_affordable(n, record, given)}, seconds=0.2 if given.quick else 1.0)
    for name, timing in timings.items():
        ratios = {f"to_{base}": timing.ratio(timings[base]) for base in bases}
        record.add(what=name, n=n, k=max(1, n // 16), threads=1, **timing.row(), **ratios)


def _memory(n: int, record: Recorder, given: argparse.Namespace) -> None:
    if n >= 10**4:  # below that, pages are too coarse a measure
        for name, call in _affordable(n, record, given).items():
            record.add(what=name, test="memory", n=n, k=max(1, n // 16), input=4 * n, memory=peak(call))


def loop_sample(logits: Tensor, k: int) -> Tensor:
    """A k-subset by the recursion over the items, one at a time and in the log domain, then back: O(nk), as SIMPLE does it."""
    batch, n = logits.shape
    row = torch.full((batch, k + 2), -torch.inf, dtype=logits.dtype)  # a column of -inf in front stands for a size below 0
    row[:, 1] = 0.0
    rows = [row]
    for i in range(n):
        row = torch.cat((row[:, :1], torch.logaddexp(row[:, 1:], row[:, :-1] + logits[:, i : i + 1])), -1)
        rows.append(row)
    left, out = torch.full((batch, 1), k + 1), torch.zeros_like(logits)
    for i in range(n - 1, -1, -1):
        chance = (logits[:, i : i + 1] + rows[i].gather(1, left - 1) - rows[i + 1].gather(1, left)).exp()
        taken = torch.rand(batch, 1) < chance
        out[:, i : i + 1] = taken
        left = (left - taken.long()).clamp(min=1)
    return out


def _recursion(record: Recorder, given: argparse.Namespace) -> None:
    """The tree computes in double precision whatever it is given, so the loop is timed in both."""
    import khot
    from khot.distributions import KSubset

    for dtype in (torch.float32, torch.float64):
        logits = draw_scores("normal", (BATCH, N), dtype, seed=given.seed)
        probs = khot.soft_topk(logits, K)
        calls = {
            LOOP: functools.partial(loop_sample, logits, K),
            TREE: lambda logits=logits: KSubset(k=K, logits=logits).sample(),
            CALIBRATED: functools.partial(khot.sample, probs, design="conditional_poisson"),
        }
        sizes = {name: sorted(set(call().sum(-1).tolist())) for name, call in calls.items()}
        timings = race(calls, seconds=2.0 if given.quick else 6.0, rounds=(5, 15), patience=20.0)
        for name, timing in timings.items():
            row = {"what": name, "test": "recursion", "dtype": str(dtype)[6:], "batch": BATCH, "n": N, "k": K, "threads": 1}
            record.add(**row, sizes=sizes[name], faster=timings[LOOP].median / timing.median, **timing.row())


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Times and memory by size, what is promised at a million, and the comparison with the plain recursion."""
    timed = [row for row in rows if "test" not in row]
    used = [row for row in rows if same(row, test="memory")]
    return [
        _by_size("milliseconds a draw; one row, float32, k = n/16", timed, _milliseconds),
        _by_size("memory beyond input and output, as a multiple of the input", used, lambda row: f"{row['memory'] / row['input']:.1f}"),
        _promises(rows),
        _loop(rows),
    ]


def _by_size(title: str, rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> Table:
    sizes = sorted({row["n"] for row in rows})
    cells = {(row["what"], row["n"]): cell(row) for row in rows}
    lines = [[what, *(cells.get((what, n), "") for n in sizes)] for what in dict.fromkeys(row["what"] for row in rows)]
    return Table(title, ["n", *map(_power, sizes)], lines)


def _milliseconds(row: dict[str, Any]) -> str:
    return "too slow" if "skipped" in row else f"{1e3 * row['seconds']:.3g}"


def _power(n: int) -> str:
    return f"10^{len(str(n)) - 1}"


def _promises(rows: list[dict[str, Any]]) -> Table:
    lines = []
    for what, (base, limit) in LIMITS.items():
        for row in rows:
            if same(row, what=what, n=10**6) and "seconds" in row:
                ratio = row[f"to_{base}"]
                lines.append([what, base, f"{ratio:.2f}", f"{limit:g}", "yes" if ratio <= limit else "NO"])
    return Table("times the time of torch's own at one row of 10^6", ["", "beside", "ratio", "aim", "met"], lines)


def _loop(rows: list[dict[str, Any]]) -> Table:
    mine = [row for row in rows if same(row, test="recursion")]
    lines = [[row["what"], row["dtype"], f"{1e3 * row['seconds']:.1f}", f"{row['faster']:.1f}"] for row in mine]
    return Table(f"a k-subset for each of {BATCH} rows of {N}, k = {K}", ["", "dtype", "milliseconds", "times faster than the loop"], lines)
