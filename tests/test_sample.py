"""The sampling verbs: sizes, gradients, fractions, infinities, errors."""

import pytest
import torch

import khot

DESIGNS = list(khot.DESIGNS)
FIXED = [name for name, row in khot.DESIGNS.items() if row.fixed_size]


@pytest.mark.parametrize("design", DESIGNS)
def test_value_is_hard_and_gradient_is_soft(design):
    scores = torch.randn(3, 8, requires_grad=True)
    weights = torch.randn(3, 8)
    z = khot.sample_topk(scores, 3, 0.5, design=design)
    assert bool(((z == 0) | (z == 1)).all())
    (grad,) = torch.autograd.grad((z * weights).sum(), scores)
    (expected,) = torch.autograd.grad((khot.soft_topk(scores, 3, 0.5) * weights).sum(), scores)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("design", FIXED)
@pytest.mark.parametrize("k", [0, 1, 7, 8, 2.25])
def test_sizes_of_sample_topk(design, k):
    torch.manual_seed(0)
    z = khot.sample_topk(torch.randn(2, 8), k, design=design, num_samples=400)
    sizes = z.sum(-1)
    assert bool(((sizes - k).abs() < 1).all())
    if khot.DESIGNS[design].exact:
        assert abs(sizes.mean().item() - k) < 0.1


def test_fraction_keeps_the_probabilities():
    torch.manual_seed(1)
    scores = torch.tensor([0.0, 1.0, -1.0, 2.0])
    z = khot.sample_topk(scores, 1.5, num_samples=40_000)
    assert (z.mean(0) - khot.soft_topk(scores, 1.5)).abs().max() < 5 * (0.25 / 40_000) ** 0.5


def test_k_per_row_with_its_gradient():
    scores, k = torch.randn(3, 6), torch.tensor([1.0, 2.5, 4.0], requires_grad=True)
    z = khot.sample_topk(scores, k, num_samples=50)
    sizes = z.sum(-1)
    assert bool((sizes[:, [0, 2]] == torch.tensor([1.0, 4.0])).all())
    assert bool(((sizes[:, 1] == 2) | (sizes[:, 1] == 3)).all())
    (grad,) = torch.autograd.grad(z.sum(-1).mean(0).sum(), k)
    torch.testing.assert_close(grad, torch.ones(3))


@pytest.mark.parametrize("design", FIXED)
def test_infinite_scores(design):
    scores = torch.tensor([torch.inf, -torch.inf, 0.0, 1.0, -torch.inf, 2.0])
    z = khot.sample_topk(scores, 3, design=design, num_samples=200)
    assert bool((z.sum(-1) == 3).all())
    assert bool((z[:, 0] == 1).all()) and bool((z[:, [1, 4]] == 0).all())
    few = khot.sample_topk(torch.tensor([-torch.inf, 0.0, -torch.inf]), 2, design=design)
    assert few.tolist() == [0.0, 1.0, 0.0]


def test_nan_stays_in_its_row():
    scores = torch.randn(3, 5)
    scores[1, 2] = torch.nan
    z = khot.sample_topk(scores, 2)
    assert bool(z[1].isnan().all())
    assert z[[0, 2]].sum(-1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_dim_and_layout(dtype):
    scores = torch.randn(4, 9, 3).to(dtype)
    z = khot.sample_topk(scores, 4, dim=1)
    assert z.dtype == dtype and z.shape == scores.shape
    assert bool((z.float().sum(1) == 4).all())
    z = khot.sample(khot.soft_topk(scores.transpose(1, 2), 4, dim=2), dim=2, k=4, num_samples=2)
    assert z.shape == (2, 4, 3, 9) and bool((z.float().sum(-1) == 4).all())
    assert khot.sample(torch.ones(2, 3), dim=0, num_samples=4).shape == (4, 2, 3)
    assert khot.sample(torch.zeros(0, 5)).shape == (0, 5)
    assert khot.sample(torch.zeros(5), num_samples=0).shape == (0, 5)


def test_single_precision_sums_that_miss():
    """Masks whose float32 sum is not k at all: sizes are k all the same."""
    torch.manual_seed(2)
    scores = torch.randn(4, 100_000)
    soft = khot.soft_topk(scores, 50_000)
    assert bool((soft.sum(-1) != 50_000).any())
    assert bool((khot.sample_topk(scores, 50_000).double().sum(-1) == 50_000).all())
    assert bool((khot.sample(soft, design="pivotal").double().sum(-1) == 50_000).all())


def test_low_temperature_is_the_hard_top():
    scores = torch.randn(5, 20)
    torch.testing.assert_close(khot.sample_topk(scores, 6, 1e-4), khot.topk_mask(scores, 6))


@pytest.mark.parametrize("method", [name for name, row in khot.RELAXATIONS.items() if row.sums_to_k and row.bounded and row.deterministic])
def test_every_method_that_sums_to_k(method):
    z = khot.sample_topk(torch.randn(3, 12), 4, 0.5, method=method)
    assert bool((z.sum(-1) == 4).all())


def test_errors():
    half = torch.full((5,), 0.5)
    for call, match in [
        (lambda: khot.sample(half), r"whole number.*2\.5.*sample_topk"),
        (lambda: khot.sample(half[:4], k=3), r"sum to k=3.*got a sum of 2;"),
        (lambda: khot.sample(half[:4], k=5), "between 0 and n=4"),
        (lambda: khot.sample(torch.tensor([1.5, 0.5])), r"\[0, 1\].*1\.5"),
        (lambda: khot.sample(torch.tensor([-0.5, 0.5, 1.0])), r"\[0, 1\].*-0\.5"),
        (lambda: khot.sample(torch.tensor([torch.nan, 1.0])), "nan"),
        (lambda: khot.sample(half[:4], design="systematik"), "did you mean 'systematic'"),
        (lambda: khot.sample(half[:4], order="sorted"), "'random' or 'fixed'"),
        (lambda: khot.sample(half[:4], num_samples=-1), "num_samples"),
        (lambda: khot.sample_topk(half, 6), "between 0 and n=5"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match=r"no option 'ordr'.*order"):
        khot.sample(half[:4], ordr="fixed")
    with pytest.raises(TypeError, match="floating"):
        khot.sample(torch.ones(3, dtype=torch.long))


def test_poisson_needs_no_whole_sum():
    z = khot.sample(torch.full((1000,), 0.0105), design="poisson", num_samples=100)
    assert 8 < z.sum(-1).mean() < 13


def test_layer_samples_in_training_only():
    layer = khot.nn.SampleTopK(3, 0.5, generator=torch.Generator().manual_seed(0))
    scores = torch.randn(2, 50, requires_grad=True)
    draws = torch.stack([layer(scores) for _ in range(5)])
    assert bool((draws.sum(-1) == 3).all()) and bool((draws.std(0) > 0).any())
    layer.eval()
    z = layer(scores)
    torch.testing.assert_close(z.detach(), khot.topk_mask(scores, 3))
    assert z.requires_grad and "design='systematic'" in repr(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("design", ["systematic", "pivotal", "pareto"])
def test_half_precision_draws_exactly_k(dtype, design):
    torch.manual_seed(0)
    scores = torch.randn(100_000).to(dtype).requires_grad_()
    z = khot.sample_topk(scores, 50_000, design=design)
    assert z.dtype == dtype and z.double().sum() == 50_000
    (grad,) = torch.autograd.grad(z[:1000].sum(), scores)
    assert grad.dtype == dtype and bool(grad.isfinite().all())


def test_the_smallest_are_drawn():
    scores = torch.tensor([3.0, torch.inf, -torch.inf, 1.0, 2.0], requires_grad=True)
    z = khot.sample_topk(scores, 2, 0.01, largest=False, num_samples=20)
    assert bool((z == torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])).all())
    weights = torch.arange(5.0)
    grads = [torch.autograd.grad((f(scores, 2, largest=False) * weights).sum(), scores)[0] for f in (khot.sample_topk, khot.soft_topk)]
    torch.testing.assert_close(*grads)
