"""Routing: how many experts of a random teacher a student finds and how well it copies it, and a byte language model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.applications import language
from bench.applications.cells import mean, options, run, seeds
from bench.applications.routers import Plain, Shrinking
from bench.common import Table, chosen, print_tables
from khot.nn import MoE, Routing, StackedFeedForward, TopKRouter, anneal

EXPERTS, K, DIM, HIDDEN, BATCH = 16, 2, 32, 32, 512
SHARP = 2.0  # deviation of the teacher's logits
BALANCE, RATE = 0.3, 1e-2  # weight of the balance loss, learning rate: for every row what suited softmax-topk best on seeds 100 to 103


def ours(**given: Any) -> Callable[[], nn.Module]:
    return lambda: TopKRouter(DIM, EXPERTS, K, **given)


ROWS: dict[str, Callable[[], nn.Module]] = {
    "euclidean": ours(),
    "softmax-topk": lambda: Plain(DIM, EXPERTS, K),
    "sigmoid-bias": lambda: Plain(DIM, EXPERTS, K, sigmoid=True),
    "softmax-k-falls": lambda: Shrinking(DIM, EXPERTS, K),
    "sigmoid": ours(method="sigmoid"),
    "euclidean-soft": ours(hard=False, tau=(2.0, 0.05)),
    "systematic": ours(design="systematic", method="sigmoid", tau=(1.0, 0.1)),
}


def main(argv: list[str]) -> int:
    made = options("routing", __doc__, first=True)
    made.add_argument("--task", choices=["teacher", "language"], default="teacher")
    made.add_argument("--steps", type=int)
    given = made.parse_args(argv)
    if given.task == "teacher":
        names = chosen(given.rows, ROWS, ["euclidean", "softmax-topk"] if given.quick else None)
        steps, wanted, work = 60 if given.quick else given.steps or 3000, 10, _teacher
    else:
        names = chosen(given.rows, language.ROWS, ["khot", "relu", "dense"] if given.quick else None)
        steps, wanted = 4 if given.quick else given.steps or language.STEPS, 5
        work = functools.partial(language.cell, folder=given.data)
    cells = [{"task": given.task, "row": row, "seed": seed, "steps": steps} for seed in seeds(given, wanted) for row in names]
    print_tables(tables(run("routing", given, cells, work)))
    return 0


def _experts() -> StackedFeedForward:
    return StackedFeedForward(EXPERTS, DIM, HIDDEN, activation=torch.relu, gated=False)


def _teacher(task: str, row: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a student on fresh tokens; compare it with its teacher on 8,192 that it has not seen."""
    torch.manual_seed(1000 + seed)
    teacher = MoE(TopKRouter(DIM, EXPERTS, K), _experts()).eval().requires_grad_(False)
    # Rows of equal length share the tokens out nearly evenly: a balance loss does not pull the student away from its teacher.
    teacher.router.weight.copy_(SHARP * nn.functional.normalize(torch.randn(EXPERTS, DIM), dim=-1))
    for weight in teacher.experts.parameters():
        weight.normal_().div_(weight.shape[1] ** 0.5)
    torch.manual_seed(seed)
    student = MoE(ROWS[row](), _experts())  # pyright: ignore[reportArgumentType]
    fit(student, teacher, steps)
    return compare(student.eval(), teacher)


def fit(student: MoE, teacher: MoE, steps: int) -> None:
    optimizer = torch.optim.Adam(student.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        anneal(student, step / steps)
        x = torch.randn(BATCH, DIM)
        out, routing = student(x)
        loss = (out - teacher(x).values).square().mean() + BALANCE * routing.balance_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def compare(student: MoE, teacher: MoE) -> dict[str, Any]:
    x = torch.randn(8192, DIM)
    (want, true), (got, found) = teacher(x), student(x)
    overlap = _overlap(true, found)
    return {
        "mse": float((got - want).square().mean() / want.var()),
        "matched": float((overlap >= 0.8).mean()),
        "load_cv": found.stats()["load_cv"],
        "active": found.stats()["active"],
    }


def _overlap(true: Routing, found: Routing) -> Any:
    """Of the best assignment of experts to experts: 2 |A and B| / (|A| + |B|) of the tokens of each pair."""
    from scipy.optimize import linear_sum_assignment

    a, b = (torch.zeros_like(routing.logits).scatter(-1, routing.indices, 1.0) for routing in (true, found))
    score = (2 * a.T @ b / (a.sum(0).unsqueeze(-1) + b.sum(0)).clamp(min=1)).numpy()
    return score[linear_sum_assignment(-score)]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    parts = {task: [row for row in rows if row["task"] == task] for task in ("teacher", "language")}
    makers = {"teacher": _teacher_table, "language": language.table}
    return [makers[task](part) for task, part in parts.items() if part]


def _teacher_table(rows: list[dict[str, Any]]) -> Table:
    head = ["row", "relative error", "experts matched", "all 16 matched", "load's variation", "experts a token", "seeds"]
    body = []
    for name in dict.fromkeys(row["row"] for row in rows):
        mine = [row for row in rows if row["row"] == name]
        values = [mean((row[key] for row in mine), digits) for key, digits in (("mse", 4), ("matched", 3), ("load_cv", 3), ("active", 2))]
        whole = sum(row["matched"] == 1 for row in mine)
        body.append([name, *values[:2], f"{whole}/{len(mine)}", *values[2:], len(mine)])
    note = "Mean and standard error over seeds; matched: at least 0.8 of the routing agrees."
    return Table("a teacher of 16 experts, 2 for each token", head, body, note)
