"""Time and memory of every sampling design, beside torch's own sort, random numbers and cumulative sum in the same run."""

from __future__ import annotations

import argparse
import functools
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
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    record = recorder("sampling", given)
    for n in progress([10**p for p in range(2, 5 if given.quick else 7)] + ([10**6] if given.quick else []), "sampling"):
        _sizes(n, record, given)
    _recursion(record, given)
    print_tables(tables(record.rows))
    return 0


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


def _sizes(n: int, record: Recorder, given: argparse.Namespace) -> None:
    """One row of n probabilities, k = n/16."""
    limit = given.limit or (0.5 if given.quick else 3.0)
    probs, keys = _probs(1, n), torch.rand(1, n)
    calls: dict[str, Callable[[], Tensor]] = {
        "sort": lambda: keys.sort(-1).values,
        "rand + cumsum": lambda: torch.rand(1, n).cumsum(-1),
    }
    for name, draw in _draws(given).items():
        if reason := affordable(lambda b, m, draw=draw: draw(_probs(b, m)), 1, n, limit=limit):
            record.add(what=name, n=n, skipped=reason)
        else:
            calls[name] = functools.partial(draw, probs)
    timings = race(calls, seconds=0.2 if given.quick else 1.0)
    for name, timing in timings.items():
        ratios = {f"to_{base}": timing.ratio(timings[base]) for base in ("sort", "rand + cumsum")}
        memory = {"memory": peak(calls[name])} if RESET.exists() else {}
        record.add(what=name, n=n, k=max(1, n // 16), threads=1, input=probs.nbytes, **timing.row(), **ratios, **memory)


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
    import khot
    from khot.distributions import KSubset

    logits = draw_scores("normal", (BATCH, N), seed=given.seed)
    probs = khot.soft_topk(logits, K)
    calls = {
        LOOP: lambda: loop_sample(logits, K),
        TREE: lambda: KSubset(k=K, logits=logits).sample(),
        CALIBRATED: lambda: khot.sample(probs, design="conditional_poisson"),
    }
    sizes = {name: sorted(set(call().sum(-1).tolist())) for name, call in calls.items()}
    timings = race(calls, seconds=2.0 if given.quick else 6.0, rounds=(5, 15), patience=20.0)
    for name, timing in timings.items():
        faster = timings[LOOP].median / timing.median
        record.add(what=name, test="recursion", batch=BATCH, n=N, k=K, threads=1, sizes=sizes[name], faster=faster, **timing.row())


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Times by size, what is promised at a million, and the comparison with the plain recursion."""
    return [_times(rows), _promises(rows), _loop(rows)]


def _times(rows: list[dict[str, Any]]) -> Table:
    mine = [row for row in rows if "test" not in row]
    sizes = sorted({row["n"] for row in mine})
    cells = {(row["what"], row["n"]): _cell(row) for row in mine}
    lines = [[what, *(cells.get((what, n), "") for n in sizes)] for what in dict.fromkeys(row["what"] for row in mine)]
    return Table(
        "milliseconds a draw (memory beyond input and output, as a multiple of the input); one row, k = n/16",
        ["n", *map(_power, sizes)],
        lines,
    )


def _cell(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return "too slow"
    return f"{1e3 * row['seconds']:.3g}" + (f" ({row['memory'] / row['input']:.0f})" if "memory" in row and row["n"] >= 10**5 else "")


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
    lines = [[row["what"], f"{1e3 * row['seconds']:.1f}", f"{row['faster']:.1f}"] for row in mine]
    return Table(f"a k-subset for each of {BATCH} rows of {N}, k = {K}", ["", "milliseconds", "times faster than the loop"], lines)
