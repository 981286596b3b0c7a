"""Successive halving's published experiment: quality (nCCS) and seconds of every selection over 85 pairs of n and k."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.common import Recorder, chosen, green, parser, print_tables, progress, recorder
from bench.seeds_protocol import BATCH, PAIRS, PUBLISHED, QUICK, SWEEP, TAUS, Select, best_setting, draw, nccs, selector, true_rows
from bench.seeds_report import tables
from bench.timing import memory_limit


@dataclass
class Entry:
    """One method at one setting in one cell."""

    method: str
    setting: str
    options: Mapping[str, Any]
    select: Select
    times: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def wanted(self, turn: int) -> bool:
        """All batches at the published setting, and where they are cheap; elsewhere two tell enough."""
        return turn < 2 or self.setting == "published" or self.method in PUBLISHED and self.times[-1] < 0.5

    def play(self, x: Tensor, v: Tensor, true: Tensor) -> None:
        began = time.perf_counter()
        found = self.select(x, v)
        self.times.append(time.perf_counter() - began)
        self.scores += nccs(true, found).tolist()


@dataclass
class Costs:
    """What a method took in the cells before, to predict the next."""

    limit: float
    seen: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def predict(self, method: str, n: int, k: int) -> float:
        guesses = [self.seen[key] * factor for key, factor in (((method, n // 2, k), 4), ((method, n, k // 2), 2.5)) if key in self.seen]
        return min(guesses, default=0.0)


def main(argv: list[str]) -> int:
    options = _options().parse_args(argv)
    torch.set_num_threads(options.threads)
    record = recorder("seeds", options)
    with memory_limit(options.gigabytes):
        _run(options, record)
    print_tables(tables(record.rows))
    return 0


def _run(options: argparse.Namespace, record: Recorder) -> None:
    methods = _methods(options, record)
    costs = Costs(options.limit or (0.15 if options.quick else 0.25))
    deadline = time.monotonic() + 60 * (options.minutes or (2.2 if options.quick else 34))
    pairs = _pairs(options)
    for n, k in progress(sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)), "seeds"):
        _cell(n, k, methods, costs, options, record, late=time.monotonic() > deadline)


def _options() -> argparse.ArgumentParser:
    options = parser("seeds", __doc__)
    options.add_argument("--items", type=int, help="items per pair for halving and iterative, default 256 (32 with --quick)")
    options.add_argument("--pairs", help="comma separated n:k instead of all 85")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--minutes", type=float, help="after this only halving and iterative go on (34; 2.2 with --quick)")
    options.add_argument("--limit", type=float, help="seconds a batch may take, of every other method (0.25; 0.15 with --quick)")
    options.add_argument("--gigabytes", type=float, default=10.0, help="memory that may be used")
    return options


def _pairs(options: argparse.Namespace) -> list[tuple[int, int]]:
    if options.pairs:
        return [(int(n), int(k)) for n, k in (pair.split(":") for pair in options.pairs.split(","))]
    return QUICK if options.quick else PAIRS


def _methods(options: argparse.Namespace, record: Recorder) -> list[str]:
    """Halving and iterative first; a mask method only scales the true items, so that its nCCS is 1 by construction."""
    import khot

    names = [name for name in PUBLISHED if name in khot.RELAXATIONS] + [name for name in khot.RELAXATIONS if name not in PUBLISHED]
    return green(chosen(options.methods, names), record)


def _cell(n: int, k: int, methods: list[str], costs: Costs, options: argparse.Namespace, record: Recorder, *, late: bool) -> None:
    """All methods in turns, batch after batch."""
    entries: list[Entry] = []
    for method in methods:
        if reason := _too_expensive(method, n, k, costs, late=late):
            record.add(what=method, n=n, k=k, skipped=reason)
            continue
        try:
            entries += _entries(method, n, k, options.seed)
        except (RuntimeError, ValueError, MemoryError) as error:
            costs.seen[method, n, k] = float("inf")
            record.add(what=method, n=n, k=k, skipped=f"fails: {str(error).splitlines()[0][:160]}")
    items = options.items or (2 * BATCH if options.quick else 256)
    for turn in range(-(-items // BATCH)):
        x, v = draw(n, min(BATCH, items - turn * BATCH), 1 + options.seed + turn)
        entries = [entry for entry in entries if not entry.wanted(turn) or _played(entry, x, v, k, record)]
    _again(entries, x, v, 0.2 if options.quick else 1.0)
    for entry in entries:
        _write(entry, n, k, options.threads, record)
        costs.seen[entry.method, n, k] = max(entry.times[-1], costs.seen.get((entry.method, n, k), 0.0))


def _played(entry: Entry, x: Tensor, v: Tensor, k: int, record: Recorder) -> bool:
    """Whether it went well; if not, a row says why."""
    try:
        entry.play(x, v, true_rows(x, v, k))
        return True
    except (RuntimeError, ValueError, MemoryError) as error:
        reason = f"fails: {str(error).splitlines()[0][:160]}"
        record.add(what=entry.method, setting=entry.setting, n=v.shape[-1], k=k, skipped=reason)
        return False


def _again(entries: list[Entry], x: Tensor, v: Tensor, seconds: float) -> None:
    """More turns on the last batch where they are cheap: a few short calls tell little about time."""
    until = time.perf_counter() + seconds
    for _ in range(25):
        for entry in entries:
            if statistics.median(entry.times) < seconds / 20:
                began = time.perf_counter()
                entry.select(x, v)
                entry.times.append(time.perf_counter() - began)
        if time.perf_counter() > until:
            break


def _too_expensive(method: str, n: int, k: int, costs: Costs, *, late: bool) -> str | None:
    if method in PUBLISHED:
        return None
    guess = costs.predict(method, n, k)
    if guess > costs.limit:
        costs.seen[method, n, k] = guess
        return f"about {guess:.2g} s a batch foretold from smaller sizes, more than {costs.limit:g} s"
    return "the time given was used up" if late else None


def _entries(method: str, n: int, k: int, seed: int) -> list[Entry]:
    """The published setting, where there is one, the default, and the best of a sweep in this cell."""
    import khot

    settings = {"published": PUBLISHED[method]} if method in PUBLISHED else {"default": {}}
    if khot.RELAXATIONS[method].kind == "matrix":
        settings["best"] = best_setting(method, n, k, SWEEP.get(method, TAUS), seed)
    return [Entry(method, setting, options, selector(method, k, options)) for setting, options in settings.items()]


def _write(entry: Entry, n: int, k: int, threads: int, record: Recorder) -> None:
    times = sorted(entry.times[1:] or entry.times)  # the first warms up
    record.add(
        what=entry.method,
        setting=entry.setting,
        options=dict(entry.options),
        n=n,
        k=k,
        items=len(entry.scores),
        threads=threads,
        nccs=statistics.fmean(entry.scores),
        spread=statistics.pstdev(entry.scores),
        seconds=statistics.median(times),
        low=times[len(times) // 4],
        high=times[(3 * len(times)) // 4],
    )
