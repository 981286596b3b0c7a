"""A k below every weight that can be written down gives an empty mask, with and without native code."""

import pytest
import torch

import khot

TINIEST = 5e-324


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("method", ["sigmoid", "euclidean", "laplace", "gaussian"])
@pytest.mark.parametrize("n", [2, 5, 64, 5000])
def test_the_smallest_k_selects_nothing(native: bool, method: str, n: int) -> None:
    scores = torch.randn(3, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if native:
        mask = khot.soft_topk(scores, TINIEST, method=method)
    else:
        with khot.kernels.disabled():
            mask = khot.soft_topk(scores, TINIEST, method=method)
    assert float(mask.sum(-1).max()) <= n * torch.finfo(torch.float64).tiny
