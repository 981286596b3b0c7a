"""Cases that were once wrong, one short test each."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

import khot
from tests.laws import dynamic_export

EPS = torch.finfo(torch.float32).eps
MODES = pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


@MODES
@pytest.mark.parametrize("method", ["sigmoid", "gaussian", "laplace", "euclidean", "entmax", "permutahedron"])
def test_lognormal_rows_sum_to_k(method: str, native: bool) -> None:
    with nullcontext() if native else khot.kernels.disabled():
        y = khot.soft_topk((6 * scores(400, 256)).exp(), 16, method=method)
    assert_close(y.double().sum(-1), torch.full((400,), 16.0, dtype=torch.float64), rtol=0, atol=4 * EPS * 16)


def test_a_tensor_k_is_not_rounded_to_half_precision() -> None:
    x = scores(2000).bfloat16()
    exact = khot.soft_topk(x.float(), 257)
    assert_close(khot.soft_topk(x, torch.tensor(257.0)).float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_samples_of_half_precision_have_exactly_k(dtype: torch.dtype) -> None:
    assert khot.sample_topk(scores(100_000).to(dtype), 50_000).float().sum() == 50_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scaled_has_a_finite_gradient_at_equal_scores(dtype: torch.dtype) -> None:
    x = torch.full((6,), 50.0, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(khot.soft_topk(x, 2, method="scaled")[0], x)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("tau", [1e-3, 1e-10])
def test_sequential_shares_among_ties_with_a_finite_gradient(tau: float) -> None:
    x = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0, 5.0], requires_grad=True)
    y = khot.soft_topk(x, 3, tau, method="sequential")
    assert_close(y, torch.tensor([1.0, 0.0, 0.5, 0.5, 0.0, 1.0]))
    y[2].backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_relaxed_gumbel_takes_a_whole_k_as_a_float() -> None:
    y = khot.estimators.relaxed_gumbel(lambda z: z.sum(-1), scores(6), k=2.0)  # type: ignore[arg-type]
    assert_close(y, torch.tensor(2.0))


@pytest.mark.parametrize("size", [1e30, -1e30])
def test_huge_equal_logits_are_uniform(size: float) -> None:
    d = khot.distributions.KSubset(k=2, logits=torch.full((6,), size))
    assert_close(d.log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])), -torch.tensor(15.0).log())


@pytest.mark.parametrize("regularization", ["l2", "kl"])
def test_ranks_of_nothing(regularization: str) -> None:
    for shape in ((0,), (3, 0), (0, 3)):
        assert khot.soft_rank(torch.zeros(shape), regularization=regularization).shape == shape
        assert khot.soft_sort(torch.zeros(shape), regularization=regularization).shape == shape


@pytest.mark.skipif(not khot.kernels.available(), reason="no native code")
@pytest.mark.parametrize("family", ["sigmoid", "euclidean", "laplace", "gaussian"])
def test_thresholds_of_empty_rows_are_set(family: str) -> None:
    _, shift = torch.ops.khot.threshold_forward(torch.zeros(3, 0), None, 0.0, None, 1.0, family, 0.0)
    assert shift.tolist() == [[0.0]] * 3


@pytest.mark.parametrize("verb", [khot.soft_topk, khot.soft_topk_matrix, khot.topk_mask, khot.sample_topk])
def test_float8_is_refused_for_the_smallest_too(verb) -> None:
    with pytest.raises(TypeError, match="must be float16, bfloat16, float32 or float64"):
        verb(scores(4).to(torch.float8_e4m3fn), 2, largest=False)


def test_a_method_of_ones_own_must_return_a_mask() -> None:
    with pytest.raises(ValueError, match=r"must return a mask of the scores' shape \(4, 6\), got \(4,\)"):
        khot.soft_topk(scores(4, 6), 2, method=lambda x, k, tau: x.sum(-1))


def test_the_module_samples_the_smallest() -> None:
    layer = khot.nn.SampleTopK(2, 1e-3, largest=False)
    x = scores(4, 6)
    assert torch.equal(layer(x), khot.topk_mask(x, 2, largest=False))
    assert torch.equal(layer.eval()(x), khot.topk_mask(x, 2, largest=False))
    assert "largest=False" in repr(layer) and "largest=False" in repr(khot.nn.SoftTopK(2, largest=False))


@dynamic_export
@pytest.mark.parametrize("method", ["counting", "scaled"])
def test_exports_with_a_long_dynamic_length(method: str) -> None:
    class Mask(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return khot.soft_topk(x, 3, 0.7, method=method)

    program = torch.export.export(Mask(), (scores(4, 9),), dynamic_shapes={"x": {1: torch.export.Dim("n", min=4, max=4096)}})
    assert_close(program.module()(scores(4, 33)), Mask()(scores(4, 33)))


@MODES
@pytest.mark.parametrize("method", ["sequential", "iterative"])
@pytest.mark.parametrize("tau", [1e-46, 1e-10, 1e-3])
def test_scores_over_tau_may_overflow(method: str, tau: float, native: bool) -> None:
    """The order is that of the scores, and the gradient is finite."""
    x = torch.tensor([[1e30, -1e30, 0.0, 1.0, 2.0, 3.0], [3e38, -3e38, 2e38, 0.0, 0.0, -3e38]], requires_grad=True)
    with nullcontext() if native else khot.kernels.disabled():
        y = khot.soft_topk(x, 2, tau, method=method)
    assert_close(y, torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]))
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert bool(grad.isfinite().all())
