"""Routing: how many experts of a random teacher a student finds, and how well it copies it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import khot
from bench.applications.cells import options, run
from bench.common import Table, chosen, print_tables
from khot.nn import MoE, Routing, StackedFeedForward, TopKRouter, anneal

EXPERTS, K, DIM, HIDDEN, BATCH = 16, 2, 32, 32, 512
SHARP = 2.0  # deviation of the teacher's logits
BALANCE = 0.1  # of the balance loss, the same in every row


class Plain(nn.Module):
    """The common router: softmax, then the k largest, renormalised; the balance loss of Switch, on the full softmax."""

    def __init__(self, k: int, *, sigmoid: bool = False) -> None:
        super().__init__()
        self.inner = TopKRouter(DIM, EXPERTS, k, bias=sigmoid)
        self.num_experts, self.sigmoid = EXPERTS, sigmoid

    def route(self, x: Tensor) -> Routing:
        logits = x @ self.inner.weight.T
        if not self.sigmoid:
            probs = logits.softmax(-1)
            indices = probs.topk(self.inner.k).indices
            return Routing(logits, logits.gather(-1, indices).softmax(-1), indices, probs * self.inner.k)
        assert self.inner.bias is not None
        probs = torch.sigmoid(logits)
        indices = (probs + self.inner.bias).topk(self.inner.k).indices
        log = nn.functional.logsigmoid(logits.gather(-1, indices))
        routing = Routing(logits, log.softmax(-1), indices, khot.topk_mask(probs.detach(), self.inner.k))
        if self.training:
            self.inner.update_bias(routing, 1e-3)
        return routing


class Shrinking(nn.Module):
    """Softmax routing whose k falls from 6 to 2 over the first 70 %."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.num_experts = Plain(K), EXPERTS

    def route(self, x: Tensor) -> Routing:
        self.plain.inner.k = max(K, round(6 - 4 * min(1.0, self.plain.inner.progress / 0.7))) if self.training else K
        return self.plain.route(x)


def ours(**given: Any) -> Callable[[], nn.Module]:
    return lambda: TopKRouter(DIM, EXPERTS, K, **given)


ROWS: dict[str, Callable[[], nn.Module]] = {
    "euclidean": ours(),
    "softmax-topk": lambda: Plain(K),
    "sigmoid-bias": lambda: Plain(K, sigmoid=True),
    "softmax-k-falls": Shrinking,
    "sigmoid": ours(method="sigmoid"),
    "euclidean-soft": ours(hard=False, tau=(2.0, 0.05)),
    "systematic": ours(design="systematic", method="sigmoid", tau=(1.0, 0.1)),
}


def main(argv: list[str]) -> int:
    given = options("routing", __doc__).parse_args(argv)
    names = chosen(given.rows, ROWS, ["euclidean", "softmax-topk"] if given.quick else None)
    steps, seeds = (60, 1) if given.quick else (3000, given.seeds or 10)
    cells = [{"task": "teacher", "row": row, "seed": seed, "steps": steps} for seed in range(seeds) for row in names]
    print_tables(tables(run("routing", given, cells, _teacher)))
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
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
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
    head = ["row", "relative error", "experts matched", "all 16 matched", "load's variation", "experts a token", "seeds"]
    body = []
    for name in dict.fromkeys(row["row"] for row in rows):
        mine = [row for row in rows if row["row"] == name]
        values = [
            functools.reduce(lambda a, b: a + b, (row[key] for row in mine)) / len(mine) for key in ("mse", "matched", "load_cv", "active")
        ]
        whole = sum(row["matched"] == 1 for row in mine)
        body.append(
            [name, f"{values[0]:.4f}", f"{values[1]:.3f}", f"{whole}/{len(mine)}", f"{values[2]:.3f}", f"{values[3]:.2f}", len(mine)]
        )
    return [
        Table("a teacher of 16 experts, 2 for each token", head, body, "Means over seeds; matched: at least 0.8 of the routing agrees.")
    ]
