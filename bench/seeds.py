"""Successive halving's published experiment: quality (nCCS) and seconds of every selection over 85 pairs of n and k."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.common import Recorder, chosen, green, parser, progress, recorder
from bench.seeds_report import report
from bench.timing import memory_limit

BATCH, WIDTH = 16, 32
PAIRS = [(2**i, 2**j) for i in range(4, 15) for j in range(1, 12) if j < i]
QUICK = [(n, k) for n, k in PAIRS if n in (16, 64, 256, 1024) and k in (2, 8, 32, 128, 512)]
PUBLISHED: dict[str, dict[str, Any]] = {"halving": {"mode": "power"}, "iterative": {"alpha": 2.0}}
SWEEP: dict[str, list[dict[str, Any]]] = {
    "halving": [{"boost": c} for c in (25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 6400.0, 25600.0, 102400.0)],
    "iterative": [{"alpha": a} for a in (2.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10)],
}
TAUS = [{"tau": tau} for tau in (1.0, 0.1, 0.01, 1e-3, 1e-4)]
Select = Callable[[Tensor, Tensor], Tensor]


def nccs(true: Tensor, found: Tensor) -> Tensor:
    """Mean over the true rows of the best cosine among the found rows: ``(..., k, d), (..., k, d) -> (...)``."""
    unit = torch.nn.functional.normalize
    return (unit(true, dim=-1) @ unit(found, dim=-1).mT).amax(-1).mean(-1)


def draw(n: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Items from U[-1, 1] and scores from U[0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, n, WIDTH, generator=generator) * 2 - 1
    return x, torch.rand(batch, n, generator=generator)


@dataclass
class Entry:
    """One method at one setting in one cell."""

    method: str
    setting: str
    options: Mapping[str, Any]
    select: Select
    times: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def play(self, x: Tensor, v: Tensor, true: Tensor) -> None:
        began = time.perf_counter()
        found = self.select(x, v)
        self.times.append(time.perf_counter() - began)
        self.scores += nccs(true, found).tolist()


@dataclass
class Costs:
    """What a method took in the cells before, to foretell the next."""

    limit: float
    seen: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def foretell(self, method: str, n: int, k: int) -> float:
        guesses = [self.seen[key] * factor for key, factor in (((method, n // 2, k), 4), ((method, n, k // 2), 2.5)) if key in self.seen]
        return min(guesses, default=0.0)


def main(argv: list[str]) -> int:
    options = _options().parse_args(argv)
    torch.set_num_threads(options.threads)
    record = recorder("seeds", options)
    with memory_limit(options.gigabytes):
        _run(options, record)
    report(record.rows)
    return 0


def _run(options: argparse.Namespace, record: Recorder) -> None:
    methods = _methods(options, record)
    costs = Costs(options.limit or (0.15 if options.quick else 0.5))
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
    options.add_argument("--limit", type=float, help="seconds a batch may take, of every other method (0.5; 0.15 with --quick)")
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


def _selector(method: str, k: int, options: Mapping[str, Any]) -> Select:
    import khot

    return lambda x, v: khot.select_topk(x, v, k, method=method, **options)


def _cell(n: int, k: int, methods: list[str], costs: Costs, options: argparse.Namespace, record: Recorder, *, late: bool) -> None:
    """All methods in turns, batch after batch."""
    entries: list[Entry] = []
    for method in methods:
        if reason := _dear(method, n, k, costs, late=late):
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
        true = _true(x, v, k)
        for entry in entries:
            if entry.method in PUBLISHED or turn < 2:  # two batches tell enough of the others
                entry.play(x, v, true)
    _again(entries, x, v, 0.2 if options.quick else 1.0)
    for entry in entries:
        _write(entry, n, k, options.threads, record)
        costs.seen[entry.method, n, k] = max(entry.times[-1], costs.seen.get((entry.method, n, k), 0.0))


def _again(entries: list[Entry], x: Tensor, v: Tensor, seconds: float) -> None:
    """More turns on the last batch where they are cheap: a few short calls tell little about time."""
    until = time.perf_counter() + seconds
    for _ in range(15):
        for entry in entries:
            if entry.times[-1] < seconds / 20:
                began = time.perf_counter()
                entry.select(x, v)
                entry.times.append(time.perf_counter() - began)
        if time.perf_counter() > until:
            break


def _true(x: Tensor, v: Tensor, k: int) -> Tensor:
    index = v.topk(k).indices
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _dear(method: str, n: int, k: int, costs: Costs, *, late: bool) -> str | None:
    if method in PUBLISHED:
        return None
    guess = costs.foretell(method, n, k)
    if guess > costs.limit:
        costs.seen[method, n, k] = guess
        return f"about {guess:.2g} s a batch foretold from smaller sizes, more than {costs.limit:g} s"
    return "the time given was used up" if late else None


def _entries(method: str, n: int, k: int, seed: int) -> list[Entry]:
    """The published setting, where there is one, the default, and the best of a sweep in this cell."""
    import khot

    settings = {"published": PUBLISHED[method]} if method in PUBLISHED else {"default": {}}
    if khot.RELAXATIONS[method].kind == "matrix":
        settings["best"] = _best(method, n, k, SWEEP.get(method, TAUS), seed)
    return [Entry(method, setting, options, _selector(method, k, options)) for setting, options in settings.items()]


def _best(method: str, n: int, k: int, settings: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The setting with the best nCCS on a small batch of its own among those that still have a gradient.

    Without the second condition the sharpest would always win: every method is the hard top-k in the limit.
    """
    x, v = draw(n, max(1, min(BATCH, 2**22 // (n * k))), seed)
    true = _true(x, v, k)
    scored = []
    for options in settings:
        select = _selector(method, k, options)
        if not scored or _alive(select, x[:1], v[:1]):
            scored.append((nccs(true, select(x, v)).mean().item(), len(scored), options))
    return max(scored)[2]


def _alive(select: Select, x: Tensor, v: Tensor, least: float = 1e-3) -> bool:
    """Whether a random linear function of the selection moves with the scores."""
    leaf = v.clone().requires_grad_()
    out = select(x, leaf)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
    return gradient.norm().item() > least


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
