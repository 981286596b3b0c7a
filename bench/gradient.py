"""Does the gradient point the right way: against the smoothed objective, and in a toy that must learn the right subset."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor

from bench.common import Recorder, Table, chosen, draw_scores, green, parser, print_tables, progress, recorder, same

N, K = 16, 4
TAUS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SIGMA = 0.5  # of the noise that smooths the hard objective
TOY_N, TOY_K, TOY_ROWS = 32, 4, 24
SETTLED = 30  # steps for which all problems must be right to call it a day


def main(argv: list[str]) -> int:
    import khot

    given = parser("gradient", __doc__).parse_args(argv)
    record = recorder("gradient", given)
    methods = green(chosen(given.methods, khot.RELAXATIONS), record)
    truth = Truth(rows=4 if given.quick else 16, samples=2000 if given.quick else 20000, seed=given.seed)
    for method in progress(methods, "gradient"):
        _agreement(method, truth, record, given)
        _toy(method, record, given)
    print_tables(tables(record.rows))
    return 0


class Truth:
    """An objective of the hard mask, ``|A m - b|^2``, and the gradient of its mean over noisy scores by central differences."""

    def __init__(self, rows: int, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.scores = draw_scores("normal", (rows, N), torch.float64, seed)
        self.a = torch.randn(8, N, generator=generator, dtype=torch.float64)
        self.b = torch.randn(8, generator=generator, dtype=torch.float64)
        self.noise = SIGMA * torch.randn(samples, N, generator=generator, dtype=torch.float64)
        self.gradient = torch.stack([self._differences(row) for row in self.scores])

    def objective(self, mask: Tensor) -> Tensor:
        return (mask @ self.a.T - self.b).square().sum(-1)

    def _differences(self, row: Tensor, step: float = 0.25) -> Tensor:
        """The same noise on both sides, so that the difference is far less noisy than its ends."""
        import khot

        moves = step * torch.eye(N, dtype=row.dtype)
        sides = [[self.objective(khot.topk_mask(row + sign * move + self.noise, K)).mean() for move in moves] for sign in (1, -1)]
        return (torch.tensor(sides[0]) - torch.tensor(sides[1])).double() / (2 * step)


def _agreement(method: str, truth: Truth, record: Recorder, given: argparse.Namespace) -> None:
    """Cosine with the smoothed objective's gradient, norm, and share of entries that are 0."""
    import khot

    for tau in TAUS:
        for hard in (False, True):
            torch.manual_seed(given.seed)
            leaf = truth.scores.clone().requires_grad_()
            loss = truth.objective(khot.soft_topk(leaf, K, tau, method=method, hard=hard)).sum()
            (gradient,) = torch.autograd.grad(loss, leaf)
            dead = gradient.norm(dim=-1) < 1e-12  # no direction to speak of
            cosine = torch.cosine_similarity(gradient, truth.gradient, dim=-1).masked_fill(dead, 0.0)
            record.add(
                what=method, test="agreement", tau=tau, hard=hard, n=N, k=K, rows=len(leaf), sigma=SIGMA,
                cosine=cosine.mean().item(), norm=gradient.norm(dim=-1).median().item(),
                zeros=(gradient.abs() < 1e-12).double().mean().item(),
            )  # fmt: skip


def _toy(method: str, record: Recorder, given: argparse.Namespace) -> None:
    """Find the subset behind ``A m``: gradient descent on ``|A soft(s) - A m*|^2``, several problems at once."""
    problems, steps = (8, 100) if given.quick else (32, 300)
    for tau in (1.0,) if given.quick else (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        for hard in (False, True):
            right = learn(method, tau, hard, problems, steps, given.seed)
            when = [_first(row) for row in right.T.tolist()]
            solved = [step for step in when if step is not None]
            middle = statistics.median(solved) if solved else None
            record.add(
                what=method, test="toy", tau=tau, hard=hard, n=TOY_N, k=TOY_K, problems=problems, steps=steps,
                solved=len(solved) / problems, median_steps=middle,
            )  # fmt: skip


def learn(method: str, tau: float, hard: bool, problems: int, steps: int, seed: int) -> Tensor:
    """Whether the hard top-k is the right subset, after each step until all is well and for each problem: ``(steps, problems)``."""
    import khot

    torch.manual_seed(seed)
    a = torch.randn(problems, TOY_ROWS, TOY_N) / TOY_ROWS**0.5
    goal = khot.topk_mask(torch.rand(problems, TOY_N), TOY_K)
    target = torch.einsum("pmn,pn->pm", a, goal)
    scores = (0.01 * torch.randn(problems, TOY_N)).requires_grad_()
    optimiser = torch.optim.Adam([scores], lr=0.05)
    right = []
    for _ in range(steps):
        mask = khot.soft_topk(scores, TOY_K, tau, method=method, hard=hard)
        loss = (torch.einsum("pmn,pn->pm", a, mask) - target).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        right.append((khot.topk_mask(scores, TOY_K) == goal).all(-1))
        if len(right) >= SETTLED and bool(torch.stack(right[-SETTLED:]).all()):
            break
    return torch.stack(right)


def _first(right: list[bool]) -> int | None:
    """The step from which on the subset is right to the end."""
    if not right[-1]:
        return None
    wrong = [step for step, good in enumerate(right) if not good]
    return wrong[-1] + 2 if wrong else 1


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Each method at the temperature where it does best."""
    lines = [_line(rows, method) for method in dict.fromkeys(row["what"] for row in rows if "test" in row)]
    head = ["", "best cosine, tau", "norm", "zeros", "toy solved, tau", "median steps"]
    return [Table("agreement with the smoothed objective's gradient, and the toy", head, lines)]


def _line(rows: list[dict[str, Any]], method: str) -> list[str]:
    agree = max((row for row in rows if same(row, what=method, test="agreement", hard=False)), key=lambda row: row["cosine"])
    toy = max((row for row in rows if same(row, what=method, test="toy")), key=lambda row: (row["solved"], -(row["median_steps"] or 0)))
    solved = f"{toy['solved']:.0%} at {toy['tau']:g}{', straight-through' if toy['hard'] else ''}" if toy["solved"] else "none"
    steps = f"{toy['median_steps']:g}" if toy["median_steps"] else "-"
    return [method, f"{agree['cosine']:.3f} at {agree['tau']:g}", f"{agree['norm']:.2g}", f"{agree['zeros']:.0%}", solved, steps]
