"""Ranks and tournaments as compilers see them: operators with shapes, derivatives and batching rules; exports with any n."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.testing import assert_close

import khot
from khot import kernels
from tests.laws import dynamic_export

METHODS = ["softrank", "halving", "neuralsort", "softsort"]


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Layer(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, scores: Tensor) -> Tensor:
        return self.body(scores)


@dynamic_export
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("matrix", [False, True], ids=["mask", "matrix"])
def test_exports_with_dynamic_n(method: str, matrix: bool) -> None:
    verb = khot.soft_topk_matrix if matrix else khot.soft_topk
    layer = Layer(lambda scores: verb(scores, 3, 0.5, method=method))
    program = export(layer, (make(2, 16),), dynamic_shapes={"scores": {1: Dim("n", min=4, max=4096)}})
    for n in (5, 16, 37):
        assert_close(program.module()(make(2, n, seed=n)), layer(make(2, n, seed=n)))


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softrank": lambda s, t: khot.soft_topk(s, 3, t, method="softrank"),
    "softrank matrix": lambda s, t: khot.softrank_matrix(s, 3, t),
    "halving": lambda s, t: khot.soft_topk(s, 3, t, method="halving"),
    "halving matrix": lambda s, t: khot.halving_matrix(s, 3, t, boost=2.0),
    "halving select": lambda s, t: khot.select_topk(s.unsqueeze(-1).expand(*s.shape, 2), s, 3, t, boost=2.0),
    "soft_rank": khot.soft_rank,
    "soft_sort": lambda s, t: khot.soft_sort(s, t, regularization="kl"),
}


def results(body: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    scores, tau = make(2, 11).requires_grad_(), torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    out = body(scores, tau)
    return [out.detach(), *torch.autograd.grad((out * make(*out.shape, seed=1)).sum(), (scores, tau))]


@pytest.mark.parametrize("name", BODIES)
def test_compiled_is_eager(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(BODIES[name], fullgraph=True, backend="aot_eager")
    expected = results(BODIES[name])
    assert_close(results(compiled), expected)
    torch.compiler.reset()
    with kernels.disabled():
        assert_close(results(torch.compile(BODIES[name], fullgraph=True, backend="aot_eager")), expected)


def test_a_compiler_sees_few_calls() -> None:
    """The rounds of the regression and of the tournament are inside operators, so that their number does not cost time to compile."""
    for method in ("softrank", "halving"):
        graph = export(Layer(lambda scores: khot.soft_topk(scores, 3, method=method)), (make(2, 1000),)).graph
        assert len(graph.nodes) < 40


@pytest.mark.parametrize("learns_tau", [False, True])
def test_operators_hold_what_they_promise(learns_tau: bool) -> None:
    x, tau = make(2, 9).requires_grad_(), torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True) if learns_tau else None
    for number in range(4):
        torch.library.opcheck(torch.ops.khot.ranks.default, (x, tau, 0.7, number, 1.0, 1.0, 0, False))
    torch.library.opcheck(torch.ops.khot.halving.default, (x, tau, 0.7, 3, 2.0, False))
    torch.library.opcheck(torch.ops.khot.isotonic_blocks.default, (x.detach(), None, False))


def test_operators_take_batches() -> None:
    x = make(3, 2, 9)
    batched = torch.vmap(lambda x: torch.ops.khot.ranks(x, None, 0.7, 0, 1.0, 1.0, 0, False)[0])(x)
    assert_close(batched, khot.soft_rank(x, 0.7))
    weights = torch.vmap(lambda x: torch.ops.khot.halving(x, None, 0.7, 3, 2.0, False)[0])(x)
    assert_close(weights, khot.soft_topk(x, 3, 0.7, method="halving", boost=2.0))
