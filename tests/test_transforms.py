"""Every transform of PyTorch over every relaxation: one table. What a method cannot keep is a False in its row."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import khot
from khot.registry import RELAXATIONS, Relaxation
from tests.laws import dynamic_export, spaced

ROWS = [row for row in RELAXATIONS.values() if row.deterministic]
MATRICES = [row for row in ROWS if row.matrix is not None]


def table(rows: list[Relaxation], flag: str | None = None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", [row for row in rows if flag is None or getattr(row, flag)], ids=str)


def mask_of(op: Relaxation) -> Callable[[Tensor], Tensor]:
    return lambda scores: khot.soft_topk(scores, 2, 0.7, method=op.name)


def matrix_of(op: Relaxation) -> Callable[[Tensor], Tensor]:
    return lambda scores: khot.soft_topk_matrix(scores, 2, 0.7, method=op.name)


def other(*shape: int) -> Tensor:
    return spaced(*shape).flip(-1) * 0.8 + 0.1


@table(ROWS)
def test_gradcheck_in_all_variants(op: Relaxation) -> None:
    scores = spaced(2, 5).requires_grad_()
    variants = {"check_batched_grad": True, "check_grad_dtypes": True}
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True} if op.forward_mode else {}
    assert gradcheck(mask_of(op), (scores,), **variants, **forward)


@table(MATRICES)
def test_gradcheck_of_matrices_in_all_variants(op: Relaxation) -> None:
    scores = spaced(1, 5).requires_grad_()
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True} if op.forward_mode else {}
    assert gradcheck(matrix_of(op), (scores,), check_batched_grad=True, check_grad_dtypes=True, **forward)


@table(MATRICES, "double_backward")
def test_gradgradcheck_of_matrices(op: Relaxation) -> None:
    assert gradgradcheck(matrix_of(op), (spaced(1, 4).requires_grad_(),))


@table(ROWS)
def test_a_trace_is_the_function(op: Relaxation) -> None:
    """Recorded on one input, run on another of the same shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for f in (mask_of(op), *([matrix_of(op)] if op.matrix is not None else [])):
            traced = torch.jit.trace(f, (spaced(3, 6),), check_trace=False)
            assert_close(traced(other(3, 6)), f(other(3, 6)))


@table(ROWS)
def test_a_graph_of_make_fx_is_the_function(op: Relaxation) -> None:
    assert_close(make_fx(mask_of(op))(spaced(3, 6))(other(3, 6)), mask_of(op)(other(3, 6)))


@table(ROWS)
def test_vmap_over_tau_alone(op: Relaxation) -> None:
    scores, taus = spaced(6), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    found = torch.vmap(lambda tau: khot.soft_topk(scores, 2, tau, method=op.name))(taus)
    assert_close(found, torch.stack([khot.soft_topk(scores, 2, float(tau), method=op.name) for tau in taus]))


@table(ROWS, "compiles")
def test_fake_tensors_have_the_right_shape(op: Relaxation) -> None:
    with FakeTensorMode() as mode:
        scores = mode.from_tensor(torch.zeros(3, 6))
        assert mask_of(op)(scores).shape == (3, 6)
        if op.matrix is not None:
            assert matrix_of(op)(scores).shape == (3, 2, 6)


@table(ROWS, "forward_mode")
def test_hessians_and_batched_jacobians(op: Relaxation) -> None:
    f = mask_of(op)
    scores, weights = spaced(5), torch.linspace(-1, 1, 5, dtype=torch.float64)
    reverse = torch.func.jacrev(f)(scores)
    assert_close(torch.func.jacfwd(f)(scores), reverse)
    assert_close(torch.autograd.functional.jacobian(f, scores, vectorize=True), reverse)
    batch = torch.stack([scores, other(5)])
    assert_close(torch.vmap(torch.func.jacrev(f))(batch)[0], reverse)
    assert_close(torch.vmap(torch.func.jacfwd(f))(batch)[1], torch.func.jacrev(f)(batch[1]))  # where torch.linalg.solve is wrong
    if op.double_backward:
        hessian = torch.func.jacrev(torch.func.jacrev(lambda s: (f(s) * weights).sum()))(scores)
        assert_close(hessian, hessian.mT, rtol=0, atol=1e-7)
        nested = torch.func.jacfwd(torch.func.jacfwd(lambda s: (f(s) * weights).sum()))(scores)
        assert_close(nested, hessian, rtol=0, atol=1e-7)


class _Module(torch.nn.Module):
    def __init__(self, op: Relaxation) -> None:
        super().__init__()
        self.method = op.name

    def forward(self, scores: Tensor) -> Tensor:
        return khot.soft_topk(scores, 2, 0.7, method=self.method)


@dynamic_export
@table(ROWS, "exports")
def test_exports_with_a_dynamic_length(op: Relaxation) -> None:
    n = torch.export.Dim("n", min=4, max=64)
    program = torch.export.export(_Module(op), (spaced(3, 6),), dynamic_shapes={"scores": {1: n}})
    for size in (6, 9, 16):
        assert_close(program.module()(other(3, size)), mask_of(op)(other(3, size)))


@pytest.mark.slow
@table(ROWS, "compiles")
def test_inductor_with_dynamic_shapes(op: Relaxation) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(mask_of(op), fullgraph=True, dynamic=True)
    for size in (6, 9):
        scores = spaced(3, size).requires_grad_()
        y = compiled(scores)
        (grad,) = torch.autograd.grad(y.square().sum(), scores)
        (plain,) = torch.autograd.grad(mask_of(op)(scores).square().sum(), scores)
        assert_close(y, mask_of(op)(scores))
        assert_close(grad, plain)


@pytest.mark.parametrize("name", ["transport"])
def test_registered_operators(name: str) -> None:
    scores = spaced(2, 5).requires_grad_()
    arguments = (scores, torch.tensor([[0.7], [0.9]], dtype=torch.float64, requires_grad=True), 0.0, 3, None, None)
    torch.library.opcheck(getattr(torch.ops.khot, name).default, arguments)
