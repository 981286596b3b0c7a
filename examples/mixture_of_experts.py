"""Can a student find the experts of its teacher? Routing with a gradient for the choice against softmax-then-top-k.

    python examples/mixture_of_experts.py [--quick] [--experts 16] [--out moe.png]

A teacher of random experts sends each token to two of them. The student sees inputs and outputs only.
Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from tqdm import tqdm

import khot
from khot.nn import MoE, Routing, StackedFeedForward, TopKRouter

DIM, HIDDEN, K = 16, 32, 2


class SoftmaxRouter(nn.Module):
    """What most models use: softmax, then the k largest. The choice has no gradient."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, DIM) / DIM**0.5)

    def route(self, x: Tensor) -> Routing:
        logits = x @ self.weight.T
        indices = logits.topk(K).indices
        return Routing(logits, logits.gather(-1, indices).softmax(-1), indices, K * logits.softmax(-1))


class Found(NamedTuple):
    """Error relative to the variance, share of the teacher's experts found, overlap of student's and teacher's experts, load."""

    error: float
    matched: float
    overlap: Tensor
    load: Tensor


def experts(num: int) -> StackedFeedForward:
    return StackedFeedForward(num, DIM, HIDDEN, activation=torch.relu, gated=False)


def make_teacher(num: int) -> MoE:
    torch.manual_seed(1)
    teacher = MoE(TopKRouter(DIM, num, K), experts(num)).eval().requires_grad_(False)
    teacher.router.weight.normal_().mul_(2 / DIM**0.5)
    for weight in teacher.experts.parameters():
        weight.normal_().div_(weight.shape[1] ** 0.5)
    return teacher


def train(student: MoE, teacher: MoE, steps: int, label: str) -> None:
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in tqdm(range(steps), desc=label):
        khot.nn.anneal(student, step / steps)
        x = torch.randn(512, DIM)
        out, routing = student(x)
        loss = (out - teacher(x).values).square().mean() + 0.1 * routing.balance_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def compare(student: MoE, teacher: MoE) -> Found:
    """On tokens that the student has not seen; experts are paired so that their tokens overlap most."""
    x = torch.randn(8192, DIM)
    (want, true), (got, found) = teacher(x), student.eval()(x)
    a, b = (torch.zeros_like(routing.logits).scatter(-1, routing.indices, 1.0) for routing in (true, found))
    overlap = 2 * a.T @ b / (a.sum(0).unsqueeze(-1) + b.sum(0)).clamp(min=1)
    _, columns = linear_sum_assignment(-overlap.numpy())
    overlap = overlap[:, torch.from_numpy(columns)]
    return Found(float((got - want).square().mean() / want.var()), float((overlap.diagonal() > 0.8).float().mean()), overlap, found.load)


def main(argv: list[str] | None = None) -> dict[str, Found]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer experts and steps")
    options.add_argument("--experts", type=int, default=16)
    options.add_argument("--out", type=Path, default=Path("moe.png"), help="the picture")
    given = options.parse_args(argv)
    num, steps = (4, 200) if given.quick else (given.experts, 3000)
    teacher, found = make_teacher(num), {}
    for name in ("khot (euclidean)", "softmax, then top-k"):
        torch.manual_seed(0)
        router = TopKRouter(DIM, num, K) if name.startswith("khot") else SoftmaxRouter(num)
        student = MoE(router, experts(num))  # pyright: ignore[reportArgumentType]
        train(student, teacher, steps, name)
        found[name] = compare(student, teacher)
    print(f"{'router':20} error / variance   experts found   load of an expert")
    for name, result in found.items():
        load = result.load
        print(f"{name:20} {result.error:16.4f}   {result.matched:13.2f}   {load.min().item()} to {load.max().item()}")
    draw(found, given.out)
    return found


def draw(found: dict[str, Found], path: Path) -> None:
    """The overlap of each pair of experts: a clean diagonal is a teacher found."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3.2))
    for axis, (name, result) in zip(axes, found.items(), strict=True):
        axis.imshow(result.overlap, cmap="viridis", vmin=0, vmax=1)
        axis.set(title=f"{name}\nerror {result.error:.3f}", xlabel="student's expert", ylabel="teacher's expert")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
