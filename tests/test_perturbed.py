"""Perturbed top-k against a closed form, and under the transforms."""

import pytest
import torch

import khot

F64 = torch.float64


def exact(x: torch.Tensor, tau: float) -> torch.Tensor:
    """The larger of two scores seen through noise: a normal distribution function of their difference."""
    return torch.special.ndtr((x[..., 0] - x[..., 1]) / (tau * 2**0.5))


def test_mean_and_gradient_have_the_closed_form():
    torch.manual_seed(0)
    x = torch.tensor([[0.3, -0.2], [1.0, 0.1], [0.0, 0.0]], dtype=F64, requires_grad=True)
    (true,) = torch.autograd.grad(exact(x, 0.7).sum(), x)
    y = khot.soft_topk(x, 1, 0.7, method="perturbed", num_samples=40_000)
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert (y[:, 0] - exact(x, 0.7)).abs().max() < 5 * 0.5 / 40_000**0.5
    assert (grad - true).abs().max() < 5 / 0.7 / 40_000**0.5
    matrix = khot.perturbed_matrix(x, 2, 0.7, num_samples=40_000)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 2, dtype=F64))
    assert (matrix[:, 0, 0] - exact(x, 0.7)).abs().max() < 5 * 0.5 / 40_000**0.5


def test_errors_of_two_rows_are_uncorrelated():
    torch.manual_seed(1)
    x = torch.zeros(2, 6, dtype=F64, requires_grad=True)
    found = []
    for _ in range(400):
        y = khot.soft_topk(x, 2, method="perturbed", num_samples=10)
        found.append(torch.autograd.grad(y[:, 0].sum(), x)[0][:, 0])
    rows = torch.stack(found)
    assert abs(torch.corrcoef(rows.T)[0, 1].item()) < 5 / 400**0.5
    assert abs(rows[:, 0].std().item() / rows[:, 1].std().item() - 1) < 0.3


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_and_torch_func(randomness):
    x = torch.randn(5, dtype=F64, generator=torch.Generator().manual_seed(0)).expand(30, 5)
    f = lambda x: khot.soft_topk(x, 2, method="perturbed", num_samples=20)  # noqa: E731
    y, grads = torch.vmap(lambda x: (f(x), torch.func.grad(lambda x: f(x)[0])(x)), randomness=randomness)(x)
    torch.testing.assert_close(y.sum(-1), torch.full((30,), 2.0, dtype=F64))
    assert grads.shape == (30, 5) and bool((grads != 0).any())
    assert bool((y == y[0]).all()) == (randomness == "same")
    matrix = torch.vmap(lambda x: khot.perturbed_matrix(x, 2, num_samples=20), randomness=randomness)(x)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(30, 2, dtype=F64))


def test_gradients_in_batches():
    x = torch.randn(3, 5, dtype=F64, requires_grad=True)
    y = khot.soft_topk(x, 2, method="perturbed", num_samples=50)
    ways = torch.randn(4, 3, 5, dtype=F64)
    (batched,) = torch.autograd.grad(y, x, ways, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, torch.stack([torch.autograd.grad(y, x, way, retain_graph=True)[0] for way in ways]))


def test_second_derivative_is_refused():
    x = torch.randn(5, requires_grad=True)
    y = khot.soft_topk(x, 2, method="perturbed")
    (grad,) = torch.autograd.grad(y[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="perturbed has no second derivative"):
        torch.autograd.grad((grad + x**2).sum(), x)
