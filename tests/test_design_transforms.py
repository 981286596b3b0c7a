"""Every design inside vmap, torch.compile and fake tensors: it draws there, or its row says that it cannot."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import khot
from tests.laws import assert_derivative_in_every_mode, spaced

ROWS = list(khot.DESIGNS.values())
PROBS = torch.tensor([0.2, 0.7, 0.8, 0.5, 0.4, 0.4, 1.0, 0.0], dtype=torch.float64)


def design_that(flag: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [row for row in ROWS if getattr(row, flag)], ids=str)


def check_sample(row, z: torch.Tensor) -> None:
    assert bool(((z == 0) | (z == 1)).all())
    assert bool((z[..., -2:] == torch.tensor([1.0, 0.0])).all())
    if row.fixed_size:
        assert bool((z.sum(-1) == 4).all())


@design_that("vmaps")
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap(row, randomness):
    probs = PROBS.expand(60, 8)
    z = torch.vmap(lambda p: khot.sample(p, design=row.name), randomness=randomness)(probs)
    check_sample(row, z)
    assert bool((z == z[:1]).all()) == (randomness == "same")
    inner = torch.vmap(lambda p: khot.sample(p, design=row.name, num_samples=3), randomness=randomness)(PROBS.expand(5, 2, 8))
    assert inner.shape == (5, 3, 2, 8)
    check_sample(row, inner)


@design_that("vmaps")
def test_inclusion_probabilities_inside_vmap(row):
    z = torch.vmap(lambda p: khot.sample(p, design=row.name), randomness="different")(PROBS.expand(4000, 8))
    if row.exact:
        assert (z.mean(0) - PROBS).abs().max() < 5 * 0.5 / 4000**0.5


@design_that("vmaps")
def test_gradient_of_a_draw_inside_torch_func(row):
    x = torch.randn(3, 6, dtype=torch.float64)
    w = torch.arange(6.0, dtype=torch.float64)
    draw = lambda x: khot.sample_topk(x, 2, 0.7, design=row.name) @ w  # noqa: E731
    soft = lambda x: khot.soft_topk(x, 2, 0.7) @ w  # noqa: E731
    torch.testing.assert_close(torch.func.grad(draw)(x[0]), torch.func.grad(soft)(x[0]))
    by_rows = torch.vmap(torch.func.grad(draw), randomness="different")(x)
    torch.testing.assert_close(by_rows, torch.vmap(torch.func.grad(soft))(x))


@design_that("vmaps")
def test_derivatives_of_a_draw_in_every_mode(row):
    """Those of the soft mask, which gradcheck holds to its value in tests/test_transforms.py."""
    x, w = spaced(6), torch.linspace(-1, 2, 6, dtype=torch.float64)
    draw = lambda x: khot.sample_topk(x, 2, 0.7, design=row.name)  # noqa: E731
    soft = lambda x: khot.soft_topk(x, 2, 0.7)  # noqa: E731
    assert_derivative_in_every_mode(draw, x, torch.autograd.functional.jacobian(soft, x))
    truth = torch.autograd.functional.hessian(lambda x: soft(x) @ w, x)
    torch.testing.assert_close(torch.autograd.functional.hessian(lambda x: draw(x) @ w, x), truth)
    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacrev(lambda x: draw(x) @ w), randomness="different")(x), truth)


@design_that("compiles")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_draw_compiles_with_dynamic_shapes(row, backend):
    torch._dynamo.reset()
    draw = torch.compile(lambda x: khot.sample_topk(x, 2, 0.7, design=row.name), fullgraph=True, dynamic=True, backend=backend)
    for n in (6, 9):
        x = spaced(3, n).requires_grad_()
        z = draw(x)
        assert bool(((z == 0) | (z == 1)).all()) and (not row.fixed_size or bool((z.sum(-1) == 2).all()))
        torch.testing.assert_close(
            *(torch.autograd.grad(y.square().sum(), x)[0] for y in (z, khot.straight_through(z, khot.soft_topk(x, 2, 0.7))))
        )


@design_that("compiles")
def test_compiles_as_one_graph(row):
    torch._dynamo.reset()
    draw = torch.compile(lambda p: khot.sample(p, design=row.name, num_samples=50), fullgraph=True, backend="aot_eager")
    z = draw(PROBS.expand(2, 8))
    assert z.shape == (50, 2, 8)
    check_sample(row, z)
    assert not torch.equal(z, draw(PROBS.expand(2, 8)))


@design_that("compiles")
def test_fake_tensors(row):
    with FakeTensorMode():
        assert khot.sample(torch.empty(3, 5), design=row.name, num_samples=2).shape == (2, 3, 5)
