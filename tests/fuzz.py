"""Hostile rows through every relaxation: ``python -m tests.fuzz --seconds 120``.

Each case draws a method, a dtype, native code or the reference, a kind of row, n, k and tau, and holds the result to what the method's
row in the registry promises: finite values and gradients, sums, range, order, nan in its own row only.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import khot
from khot.registry import Relaxation

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (0, 1, 2, 3, 7, 16, 33, 100)
_SHORT = 16  # the methods that compare all pairs or draw samples get no longer rows
ROWS = 3


def _normal(n: int, gen: torch.Generator) -> Tensor:
    return torch.randn(ROWS, n, generator=gen, dtype=torch.float64)


def _stepped(n: int, gen: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (ROWS, n), generator=gen).double() * torch.tensor([[1.0], [1e3], [1e-3]], dtype=torch.float64)


def _infinite(n: int, gen: torch.Generator) -> Tensor:
    kinds = torch.randint(0, 5, (ROWS, n), generator=gen)
    return torch.where(kinds == 0, torch.inf, torch.where(kinds == 1, -torch.inf, _normal(n, gen)))


def _with_nan(n: int, gen: torch.Generator) -> Tensor:
    scores = _infinite(n, gen)
    scores[1, : n // 2 + 1] = torch.nan
    return scores


KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "tiny": lambda n, gen: _normal(n, gen) * 1e-30,
    "huge": lambda n, gen: _normal(n, gen) * 1e30,
    "ties": lambda n, gen: _normal(n, gen).round(),
    "equal": lambda n, gen: torch.full((ROWS, n), 50.0, dtype=torch.float64),
    "lognormal": lambda n, gen: torch.exp(6 * _normal(n, gen)),
    "cauchy": lambda n, gen: _normal(n, gen) / _normal(n, gen),
    "stepped": _stepped,
    "shifted": lambda n, gen: _normal(n, gen) + 1e4,
    "infinite": _infinite,
    "nan": _with_nan,
}


@dataclass(frozen=True)
class Case:
    """One call."""

    op: Relaxation
    kind: str
    dtype: torch.dtype
    n: int
    k: float
    tau: float
    native: bool
    seed: int

    def __str__(self) -> str:
        where = "native" if self.native else "reference"
        return f"{self.op} {self.kind} {self.dtype} n={self.n} k={self.k:g} tau={self.tau:.4g} {where} seed={self.seed}"

    def scores(self) -> Tensor:
        scores = KINDS[self.kind](self.n, torch.Generator().manual_seed(self.seed))
        largest = torch.finfo(self.dtype).max / 8
        return torch.where(scores.isfinite(), scores.clamp(-largest, largest), scores).to(self.dtype)


def draw(rng: random.Random, op: Relaxation) -> Case:
    n = rng.choice([n for n in SIZES if n <= _SHORT or op.deterministic and op.name != "sequential"])
    k: float = rng.choice([0, min(1, n), n // 2, max(n - 1, 0), n])
    if op.grad_k and n and rng.random() < 0.5:
        k = rng.choice([1e-6, 0.5, n / 3, n - 0.5, n - 1e-4])
    tau = 10 ** rng.uniform(-1, 1) if rng.random() < 0.5 else 10 ** rng.uniform(-2, 2)
    return Case(op, rng.choice(list(KINDS)), rng.choice(DTYPES), n, k, tau, rng.random() < 0.5, rng.randrange(1 << 30))


def failures(case: Case) -> list[str]:
    """What is wrong with the mask of this case and its gradient."""
    op, eps = case.op, torch.finfo(case.dtype).eps
    scores = case.scores().requires_grad_()
    with contextlib.nullcontext() if case.native else khot.kernels.disabled():
        torch.manual_seed(case.seed)
        y = op.topk(scores, case.k, case.tau)
        weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(case.seed), dtype=torch.float64).to(y.dtype)
        (grad,) = torch.autograd.grad((y * weights).sum(), scores)
    lost = scores.detach().isnan().any(-1)
    wrong = []
    if y.shape != scores.shape or y.dtype != scores.dtype or grad.dtype != scores.dtype:
        wrong.append("shape or dtype")
    if not bool(y[lost].isnan().all()) or not bool(grad[lost].isnan().all()):
        wrong.append("a nan that is lost")
    x, mask, slope = scores.detach()[~lost].double(), y.detach()[~lost].double(), grad[~lost]
    if not bool(mask.isfinite().all()):
        wrong.append("value not finite")
    if bool(slope.isnan().any()) or bool(slope.isinf().any()) and not _overflows(case, weights):
        wrong.append("gradient not finite")
    if op.sums_to_k:
        due = (x > -torch.inf).sum(-1).clamp(max=case.k) if isinstance(case.k, int) else _due(x, case.k)
        if not bool(((mask.sum(-1) - due).abs() <= 4 * eps * max(1.0, case.k) + 1e-12).all()):
            wrong.append(f"sums to {mask.sum(-1).tolist()}, not {due.tolist()}")
    if op.bounded and not bool(((mask >= 0) & (mask <= 1 + 4 * eps)).all()):
        wrong.append("out of range")
    if op.monotone and op.deterministic and case.n:
        order = x.argsort(dim=-1, stable=True)
        if not bool((mask.gather(-1, order).diff() >= -8 * max(eps, 1e-6 if case.dtype != torch.float64 else eps)).all()):
            wrong.append("out of order")
    return wrong


def _overflows(case: Case, weights: Tensor) -> bool:
    """Whether a gradient that grows faster than 1 / tau is beyond half precision: the same row in float32 tells."""
    if case.op.scale_free or case.dtype not in (torch.float16, torch.bfloat16):
        return False
    scores = case.scores().float().requires_grad_()
    with contextlib.nullcontext() if case.native else khot.kernels.disabled():
        torch.manual_seed(case.seed)
        (grad,) = torch.autograd.grad((case.op.topk(scores, case.k, case.tau) * weights.float()).sum(), scores)
    return bool((grad.abs() > torch.finfo(case.dtype).max / 2).any())


def _due(x: Tensor, k: float) -> Tensor:
    return (x > -torch.inf).sum(-1).double().clamp(max=k)


def run(seconds: float, seed: int = 0, most: int = 10, cases: int | None = None) -> tuple[int, list[str]]:
    """Try cases over every method in turn until the time is over; how many were tried, and what went wrong."""
    rng, tried, found, end = random.Random(seed), 0, [], time.monotonic() + seconds
    while time.monotonic() < end and len(found) < most and (cases is None or tried < cases):
        for op in khot.RELAXATIONS.values():
            case = draw(rng, op)
            try:
                wrong = failures(case)
            except Exception as error:  # anything that is raised is a finding
                wrong = [f"{type(error).__name__}: {error}"[:300]]
            tried += 1
            if wrong:
                found.append(f"{case}: {'; '.join(wrong)}")
    return tried, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10, help="stop after this many findings")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tried, found = run(given.seconds, given.seed, given.most)
    print(f"{tried} cases, {len(found)} wrong")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
