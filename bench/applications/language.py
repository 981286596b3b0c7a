"""A small byte language model with mixtures of experts: two layers, 16 experts in each, 2 for each token."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.applications.cells import Clock, mean
from bench.applications.data import text
from bench.applications.routers import Plain, Rectified
from bench.common import Table
from khot.nn import MoE, Routing, StackedFeedForward, TopKRouter, anneal

EXPERTS, K, DIM, HIDDEN, LAYERS, HEADS = 16, 2, 96, 96, 2, 4
CONTEXT, BATCH, RATE, STEPS = 128, 16, 3e-3, 600
Penalty = Callable[[nn.Module, Routing], Tensor]


def balanced(weight: float, z: float = 0.0) -> Penalty:
    return lambda router, routing: weight * routing.balance_loss() + z * routing.z_loss()


def adaptive(router: nn.Module, routing: Routing) -> Tensor:
    assert isinstance(router, Rectified)
    return router.penalty(routing)


# A row is a router and what is added to the loss; the dense model has neither.
ROWS: dict[str, tuple[Callable[[], nn.Module], Penalty] | None] = {
    "khot": (lambda: TopKRouter(DIM, EXPERTS, K), balanced(0.1)),
    "mixtral": (lambda: Plain(DIM, EXPERTS, K), balanced(0.01, 0.001)),
    "mixtral-strong": (lambda: Plain(DIM, EXPERTS, K), balanced(0.1, 0.001)),
    "sigmoid-bias": (lambda: Plain(DIM, EXPERTS, K, sigmoid=True), balanced(0.0)),
    "relu": (lambda: Rectified(DIM, EXPERTS, K), adaptive),
    "khot-soft": (lambda: TopKRouter(DIM, EXPERTS, K, hard=False, tau=(2.0, 0.05)), balanced(0.1)),
    "dense": None,
}


class Block(nn.Module):
    """Causal attention, then a mixture of experts, or a plain network as wide as the experts of one token together."""

    def __init__(self, make: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mix, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        experts = StackedFeedForward(1 if make is None else EXPERTS, DIM, HIDDEN * (K if make is None else 1))
        # A capacity that nothing reaches leaves out the places of weight 0, of which relu routing has many.
        self.wide = experts if make is None else MoE(make(), experts, capacity=float(EXPERTS))  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        parts = self.mix(self.first(x)).unflatten(-1, (3, HEADS, DIM // HEADS)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, width)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        normal = self.second(x)
        if isinstance(self.wide, MoE):
            values, routing = self.wide(normal)
            return x + values, routing
        rows = normal.flatten(0, 1)
        return x + self.wide(rows, torch.tensor([len(rows)])).view_as(x), None


class Model(nn.Module):
    """Bytes in, logits of the next byte and the routings out."""

    def __init__(self, make: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block(make) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 256))
        nn.init.normal_(self.symbols.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        x, routings = self.symbols(tokens) + self.places.weight[: tokens.shape[-1]], []
        for block in self.blocks:
            x, routing = block(x)
            routings += [routing] if routing is not None else []
        return self.head(x), routings


def cell(task: str, row: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    train, held = corpus(folder)
    torch.manual_seed(seed)
    choice = ROWS[row]
    model = Model(choice[0] if choice else None)
    clock = Clock()
    fit(model, train, steps, choice[1] if choice else None)
    return {**clock.step_ms(steps), **validate(model.eval(), held)}


@functools.cache
def corpus(folder: Path) -> tuple[Tensor, Tensor]:
    """Bytes to train on and to validate on: of a hundred pieces of the text, every tenth is held out."""
    pieces = torch.frombuffer(bytearray(text(folder)), dtype=torch.uint8).long().chunk(100)
    return torch.cat([p for i, p in enumerate(pieces) if i % 10 != 9]), torch.cat([p for i, p in enumerate(pieces) if i % 10 == 9])


def fit(model: Model, train: Tensor, steps: int, penalty: Penalty | None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    rate: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    routers = [module.router for module in model.modules() if isinstance(module, MoE)]
    for step in range(steps):
        anneal(model, step / steps)
        starts = torch.randint(len(train) - CONTEXT - 1, (BATCH, 1))
        rows = train[starts + torch.arange(CONTEXT + 1)]
        logits, routings = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        if penalty is not None:
            loss = loss + sum(penalty(router, routing) for router, routing in zip(routers, routings, strict=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def validate(model: Model, held: Tensor, batches: int = 24) -> dict[str, Any]:
    """Loss in nats a byte on the same held-out rows for everybody, and how the experts share the tokens."""
    rows = held[: (len(held) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total, count, loads, active = 0.0, 0, torch.zeros(LAYERS, EXPERTS, dtype=torch.float64), []
    for part in rows[torch.linspace(0, len(rows) - 1, batches * BATCH).long()].split(BATCH):
        logits, routings = model(part[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        count += part[:, 1:].numel()
        for layer, routing in enumerate(routings):
            loads[layer] += routing.load
            active.append(routing.stats()["active"])
    if not active:
        return {"loss": total / count}
    spread = loads.std(-1, correction=0) / loads.mean(-1)
    return {
        "loss": total / count,
        "active": sum(active) / len(active),
        "load_cv": float(spread.mean()),
        "load_cv_worst": float(spread.max()),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    head = ["row", "validation loss", "experts a token", "load's variation", "worst layer", "processor ms a step", "seeds"]
    keys = (("loss", 4), ("active", 2), ("load_cv", 3), ("load_cv_worst", 3), ("step_cpu_ms", 0))
    groups = {name: [row for row in rows if row["row"] == name] for name in dict.fromkeys(row["row"] for row in rows)}
    body = [[name, *(mean((r[key] for r in mine if key in r), digits) for key, digits in keys), len(mine)] for name, mine in groups.items()]
    note = "Nats a byte on held-out text, mean and standard error; the dense model is as wide as two experts."
    return Table("a byte language model, 16 experts in each of two layers, 2 for each token", head, body, note)
