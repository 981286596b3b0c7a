"""What the laws share: the rows of the registry, by their flags, and scores to try them on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import khot
from khot.registry import RELAXATIONS, Relaxation

ROWS = list(RELAXATIONS.values())
MATRICES = [row for row in ROWS if row.matrix is not None]
DETERMINISTIC = [row for row in ROWS if row.deterministic]
EPS = torch.finfo(torch.float64).eps


# docs/guarantees.md says so.
dynamic_export = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="torch 2.6 takes a dynamic length for a constant"
)


def rows_that(flag: str, rows: list[Relaxation] = ROWS) -> list[Relaxation]:
    return [row for row in rows if getattr(row, flag)]


def law(rows: list[Relaxation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", rows, ids=str)


def make(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def topk(op: Relaxation, scores: Tensor, k: float | Tensor, tau: float | Tensor = 1.0, **options: object) -> Tensor:
    torch.manual_seed(0)  # for the methods that draw
    return khot.soft_topk(scores, k, tau, method=op.name, **options)


def spaced(*shape: int) -> Tensor:
    """Scores far enough apart that a finite difference crosses no kink."""
    n = shape[-1]
    order = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(torch.Size(shape[:-1]).numel())])
    return (order.double() * 0.37 + torch.arange(n) * 0.013).reshape(shape)


def assert_derivative_in_every_mode(f: Callable[[Tensor], Tensor], x: Tensor, truth: Tensor) -> None:
    """What gradcheck's variants look at, for a function whose derivative is not that of its value, or that draws at random:
    reverse, batched reverse, forward and batched forward mode give the Jacobian ``truth``, and gradients have the dtype of ``x``."""
    assert_close(torch.autograd.functional.jacobian(f, x), truth)
    assert_close(torch.autograd.functional.jacobian(f, x, vectorize=True), truth)
    ways = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    push = lambda way: torch.func.jvp(f, (x,), (way,))[1]  # noqa: E731
    columns = truth.reshape(*truth.shape[: truth.ndim - x.ndim], -1).movedim(-1, 0)
    assert_close(push(ways[0]), columns[0])
    for randomness in ("different", "same"):
        assert_close(torch.vmap(push, randomness=randomness)(ways), columns)
    single = x.float().requires_grad_()
    (grad,) = torch.autograd.grad(f(single).sum(), single)
    assert grad.dtype == torch.float32
