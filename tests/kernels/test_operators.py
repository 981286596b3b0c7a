"""The registered operators: shapes, derivatives, batching and compilers."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import khot
from khot import kernels
from tests.kernels.rows import FAMILIES

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_(grad)


def arguments(family: str, grad: bool = True) -> tuple:
    k = torch.tensor([[1.5], [2.0], [3.25]], dtype=torch.float64, requires_grad=grad)
    tau = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64, requires_grad=grad)
    return randn(3, 7, grad=grad), k, 0.0, tau, 0.0, family, 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_opcheck(family: str) -> None:
    torch.library.opcheck(torch.ops.khot.threshold_forward.default, arguments(family))
    torch.library.opcheck(torch.ops.khot.threshold_forward.default, (randn(2, 5, grad=True), None, 2.0, None, 0.7, family, 0.0))
    x, k, _, tau, *_ = arguments(family, grad=False)
    y, shift = torch.ops.khot.threshold_forward(x, k, 0.0, tau, 0.0, family, 0.0)
    torch.library.opcheck(torch.ops.khot.threshold_backward.default, (randn(3, 7), y, x, shift, tau, 0.0, family, 0.0, True))


@pytest.mark.parametrize("family", ["sigmoid", "laplace", "gaussian"])
def test_derivatives_of_the_operator(family: str) -> None:
    x, k, _, tau, *_ = arguments(family)

    def mask(x: torch.Tensor, k: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        return torch.ops.khot.threshold_forward(x, k, 0.0, tau, 0.0, family, 0.0)[0]

    assert torch.autograd.gradcheck(mask, (x, k, tau))


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    def loss(x: torch.Tensor, k: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        return (khot.soft_topk(x, k, tau, method=family) * torch.arange(7.0)).sum()

    leaves = [value.squeeze(-1).float() for value in arguments(family)[1:4:2]]
    inputs = [value.detach().requires_grad_() for value in (randn(3, 7).float(), *leaves)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


def test_tracing_sees_the_operator() -> None:
    graph = make_fx(lambda x: khot.soft_topk(x, 2.0))(randn(2, 5))
    assert any("threshold_forward" in str(node.target) for node in graph.graph.nodes)
    x = randn(2, 5) + 1
    assert_close(graph(x), khot.soft_topk(x, 2.0))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        y = khot.soft_topk(torch.empty(4, 9), 2)
    assert y.shape == (4, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_transforms(family: str) -> None:
    x = randn(4, 3, 6)

    def mask(row: torch.Tensor) -> torch.Tensor:
        return khot.soft_topk(row, 2, 0.7, method=family)

    assert_close(torch.vmap(mask, in_dims=1, out_dims=1)(x), mask(x))
    direct = torch.autograd.functional.jacobian(mask, x[0, 0])
    assert_close(torch.func.jacrev(mask)(x[0, 0]), direct)
    assert_close(torch.func.jacfwd(mask)(x[0, 0]), direct)
    if family != "euclidean":
        assert torch.autograd.gradgradcheck(mask, (x[0].clone().requires_grad_(),))


def test_batched_operator() -> None:
    x, k, _, tau, _, family, _ = arguments("sigmoid", grad=False)
    batched = torch.vmap(lambda x, k: torch.ops.khot.threshold_forward(x, k, 0.0, tau, 0.0, family, 0.0)[0], in_dims=(1, None))
    stacked = torch.stack([x, x + 1, 2 * x], 1)
    expected = torch.stack([torch.ops.khot.threshold_forward(stacked[:, i], k, 0.0, tau, 0.0, family, 0.0)[0] for i in range(3)])
    assert_close(batched(stacked, k), expected)


def test_autocast() -> None:
    x = randn(3, 9).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = khot.soft_topk(x, 2)
    with kernels.disabled():
        assert_close(y, khot.soft_topk(x, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_gradients(family: str) -> None:
    x = randn(6)

    def mask(s: torch.Tensor) -> torch.Tensor:
        return khot.soft_topk(s, 2, 0.7, method=family)

    direct = torch.autograd.functional.jacobian(mask, x)
    assert_close(torch.autograd.functional.jacobian(mask, x, vectorize=True), direct)
    leaf = x.clone().requires_grad_()
    (batched,) = torch.autograd.grad(mask(leaf), leaf, torch.eye(6, dtype=torch.float64), is_grads_batched=True)
    assert_close(batched, direct)


def test_dual_gradient_of_a_plain_forward() -> None:
    x = randn(6, grad=True)
    y = khot.soft_topk(x, 2)
    tangent = torch.arange(6.0, dtype=torch.float64)
    (expected,) = torch.autograd.grad(y, x, tangent, retain_graph=True)
    with forward_ad.dual_level():
        (grad,) = torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones(6, dtype=torch.float64), tangent))
        assert_close(forward_ad.unpack_dual(grad).tangent, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", [*FAMILIES, "entmax"])
def test_jit_trace(family: str) -> None:
    traced = torch.jit.trace(lambda s: khot.soft_topk(s, 2, method=family), randn(3, 5), check_trace=False)
    x = randn(3, 5) * 2 + 1
    assert_close(traced(x), khot.soft_topk(x, 2, method=family))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "entmax", "permutahedron"])
def test_gradient_of_a_row_with_nan_is_nan(family: str, native: bool) -> None:
    x = randn(3, 5)
    x[1, 2] = torch.nan
    x.requires_grad_()
    with contextlib.nullcontext() if native else kernels.disabled():
        (grad,) = torch.autograd.grad((khot.soft_topk(x, 2, method=family) * torch.arange(5.0)).sum(), x)
    assert bool(grad[1].isnan().all()) and bool(grad[[0, 2]].isfinite().all())


def test_operator_on_rows_without_items() -> None:
    mask, shift = torch.ops.khot.threshold_forward(torch.empty(3, 0), None, 0.0, None, 1.0, "sigmoid", 0.0)
    assert mask.shape == (3, 0) and torch.equal(shift, torch.zeros(3, 1, dtype=torch.float64))
