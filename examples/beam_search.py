"""Training through a beam: the cheapest path through a graph whose best first step is a trap.

    python examples/beam_search.py [--quick] [--graphs 20] [--out beam_search.png]

A model gives each next node a probability. It starts from what each step costs, so that greedy search walks into the trap; the relaxed
beam sees the cost of whole paths, and its gradient teaches the model. The right path is known from dynamic programming.
Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import khot

LENGTH, NODES, BEAMS = 5, 6, 3


def graph(seed: int) -> Tensor:
    """Costs ``(LENGTH, NODES, NODES)`` of going from one node to the next; the path starts at node 0. The cheapest first step is a trap."""
    generator = torch.Generator().manual_seed(seed)
    costs = 0.5 + 0.5 * torch.rand((LENGTH, NODES, NODES), generator=generator)
    first, trap = torch.randperm(NODES - 1, generator=generator)[:2].add(1).tolist()
    path = [0, first, *torch.randint(NODES, (LENGTH - 1,), generator=generator).tolist()]
    for step in range(LENGTH):
        costs[step, path[step], path[step + 1]] = 0.4 if step == 0 else 0.1
    costs[0, 0, trap] = 0.0
    costs[1, trap] += 3.0
    return costs


def cheapest(costs: Tensor) -> list[int]:
    """The best path, by dynamic programming from the end."""
    value, choice = torch.zeros(NODES), []
    for step in reversed(range(LENGTH)):
        value, best = (costs[step] + value).min(1)
        choice.append(best)
    path, node = [], 0
    for best in reversed(choice):
        node = int(best[node])
        path.append(node)
    return path


def stepper(logits: Tensor) -> Any:
    """The step of the search. The state is a one-hot clock, which mixes as any state does."""

    def step(given: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
        where = given if given.is_floating_point() else torch.nn.functional.one_hot(given, NODES).to(logits.dtype)
        table = torch.einsum("bkt,tij->bkij", clock, logits)
        return torch.einsum("bki,bkij->bkj", where, table).log_softmax(-1), clock.roll(1, -1)

    return step


def search(logits: Tensor, beams: int, **options: Any) -> Any:
    clock = torch.nn.functional.one_hot(torch.zeros(1, dtype=torch.int64), LENGTH).to(logits.dtype)
    return khot.beam_search(stepper(logits), torch.zeros(1, dtype=torch.int64), num_beams=beams, max_length=LENGTH, state=clock, **options)


def path_cost(tokens: Tensor, costs: Tensor) -> Tensor:
    """Of soft paths ``(B, K, LENGTH, NODES)``, ``(B, K)``."""
    first = torch.nn.functional.one_hot(torch.zeros(tokens.shape[:2], dtype=torch.int64), NODES).to(tokens.dtype).unsqueeze(2)
    return torch.einsum("bkti,tij,bktj->bk", torch.cat([first, tokens[:, :, :-1]], 2), costs, tokens)


def learn(costs: Tensor, steps: int, method: str) -> tuple[Tensor, list[float]]:
    """Logits that the relaxed beam has taught, and the cost on the way."""
    logits = (-2 * costs).clone().requires_grad_()
    optimizer, seen = torch.optim.Adam([logits], lr=0.1), []
    for step in range(steps):
        tau = 0.1 * 0.2 ** (step / steps)
        loss = search(logits, BEAMS, tau=tau, method=method).expected(lambda tokens: path_cost(tokens, costs)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    return logits.detach(), seen


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="4 graphs")
    options.add_argument("--graphs", type=int, default=20)
    options.add_argument("--method", default="iterative", help="a matrix method of khot.RELAXATIONS")
    options.add_argument("--out", type=Path, default=Path("beam_search.png"), help="the picture")
    given = options.parse_args(argv)
    count, steps = (4, 80) if given.quick else (given.graphs, 150)
    right = {"greedy, before": 0, f"beam {BEAMS}, before": 0, "greedy, after": 0, f"beam {BEAMS}, after": 0}
    curves = []
    for seed in tqdm(range(count), desc="graphs"):
        costs = graph(seed)
        best, before = cheapest(costs), -2 * costs
        after, curve = learn(costs, steps, given.method)
        curves.append((curve, float(path_cost(torch.nn.functional.one_hot(torch.tensor(best), NODES).float()[None, None], costs))))
        for when, logits in (("before", before), ("after", after)):
            for name, beams in (("greedy", 1), (f"beam {BEAMS}", BEAMS)):
                right[f"{name}, {when}"] += search(logits, beams).sequences[0, 0].tolist() == best
    share = {name: value / count for name, value in right.items()}
    for name, value in share.items():
        print(f"{name:18} finds the cheapest path in {value:4.0%} of {count} graphs")
    draw(curves, given.out)
    return share


def draw(curves: list[tuple[list[float], float]], path: Path) -> None:
    """The expected cost of the relaxed beam above the cheapest path's, one line for each graph."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3))
    for curve, least in curves:
        axis.plot([value - least for value in curve], lw=1)
    axis.axhline(0, color="black", lw=0.5)
    axis.set(xlabel="step", ylabel="cost above the cheapest path")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
