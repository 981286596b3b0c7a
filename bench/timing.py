"""Timing in turns, and guessing what a run would cost before paying for it."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]


@dataclass
class Timing:
    """Seconds per call, one entry a round."""

    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.times) < 2:
            return self.times[0], self.times[0]
        low, _, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return low, high

    def ratio(self, base: Timing) -> float:
        """Median over the rounds of this time over the other's in the same round, so that a slow spell of the machine cancels."""
        return statistics.median(a / b for a, b in zip(self.times, base.times))  # noqa: B905, the base runs longer

    def row(self) -> dict[str, float | int]:
        low, high = self.quartiles
        return {"seconds": self.median, "low": low, "high": high, "rounds": len(self.times)}


def race(
    candidates: Mapping[str, Call], *, seconds: float = 0.2, rounds: tuple[int, int] = (5, 40), patience: float = 2.0
) -> dict[str, Timing]:
    """Time the candidates in turns, round after round, in one run.

    Args:
        candidates: name -> what to call. The first is the base of ratios and runs in every round.
        seconds: how long each candidate may run in all, once it has had the least number of rounds.
        rounds: the least and the largest number of rounds.
        patience: a candidate that has run this long stops even before the least number of rounds.
    """
    loops = {name: _loops(call) for name, call in candidates.items()}
    found = {name: Timing() for name in candidates}
    base, *others = candidates
    running, spent = set(others), dict.fromkeys(candidates, 0.0)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds[1]):
            order = [base, *(name for name in others if name in running)]
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                took = _measure(candidates[name], loops[name])
                found[name].times.append(took)
                spent[name] += took * loops[name]
            allowed = seconds if turn + 1 >= rounds[0] else patience
            running = {name for name in running if spent[name] < allowed}
            if not running and (others or spent[base] > allowed):
                break
    finally:
        if collecting:
            gc.enable()
    return found


def _measure(call: Call, loops: int) -> float:
    began = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - began) / loops


def _loops(call: Call, settle: float = 5e-3) -> int:
    """Warm up, and find how many calls make a measurement last as long as ``settle``: long enough that what ran before is forgotten."""
    if _measure(call, 1) > 0.1:
        return 1
    return max(1, min(1000, math.ceil(settle / max(_measure(call, 1), 1e-7))))


def affordable(call: Callable[[int, int], object], batch: int, n: int, *, limit: float) -> str | None:
    """Whether ``call(batch, n)`` will take less than ``limit`` seconds; if not, why.

    Climbs from a small size in steps of 4 in ``n`` and 16 in ``batch``, and predicts each step from the growth of the last.
    """
    took, power = 0.0, 1.0
    steps = _climb(batch, n)
    for (b, m), (next_b, next_m) in zip(steps, [*steps[1:], steps[-1]], strict=True):
        growth = (next_b / b) * (next_m / m) ** power
        try:
            now = _measure(lambda: call(b, m), 1)  # noqa: B023, called at once
            if now * growth > limit:  # a spell of the machine, or really so?
                now = min(now, _measure(lambda: call(b, m), 1))  # noqa: B023
        except (RuntimeError, ValueError, MemoryError) as error:
            return f"fails at ({b}, {m}): {str(error).splitlines()[0][:160]}"
        if b == 1 and took > 3e-4:
            power = min(3.0, max(1.0, math.log(now / took, 4)))
        took = now
        if took * (next_b / b) * (next_m / m) ** power > limit:
            whole = took * (batch / b) * (n / m) ** power
            return f"about {whole:.2g} s a call, more than {limit:g} s (foretold from {took:.2g} s at {b} x {m})"
    return None


def _climb(batch: int, n: int) -> list[tuple[int, int]]:
    sizes = [n]
    while sizes[-1] > 1024:
        sizes.append(sizes[-1] // 4)
    batches = [batch]
    while batches[-1] > 1:
        batches.append(max(1, batches[-1] // 16))
    return [(1, size) for size in reversed(sizes)] + [(b, n) for b in reversed(batches[:-1])]


@contextlib.contextmanager
def memory_limit(gigabytes: float) -> Iterator[None]:
    """Make an allocation beyond this fail as an error, where the system can, instead of ending the process."""
    try:
        import resource
    except ImportError:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    size = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (size if before[1] < 0 else min(size, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Call:
    """A call of forward and backward with a fixed cotangent."""
    leaf = x.detach().clone().requires_grad_()
    with torch.no_grad():
        cotangent = torch.randn_like(function(leaf))

    def both() -> object:
        return torch.autograd.grad(function(leaf), leaf, cotangent)

    return both
