"""The blocks of the iterative relaxation against its formula, all rows at once."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot
from khot.primitives import peaks
from khot.relaxations.iterative import _rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [1, 200, 1 << 16])
def test_blocks_are_the_formula(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 50, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    way = torch.randn(2, 3, 20, 50, generator=generator, dtype=torch.float64).to(dtype)
    for made, plain, to in (
        (khot.iterative_matrix(x, 20, 0.7), _rows(x, 20, 0.7, 2.0, None)(0, 20), way),
        (khot.soft_topk(x, 20, 0.7, method="iterative"), _rows(x, 20, 0.7, 2.0, None)(0, 20).sum(-2), way[..., 0, :]),
    ):
        assert_close(made, plain)
        assert_close(torch.autograd.grad((made * to).sum(), x)[0], torch.autograd.grad((plain * to).sum(), x)[0], rtol=1e-4, atol=1e-5)


def test_ties_win_once_each() -> None:
    matrix = khot.iterative_matrix(torch.zeros(1, 5), 5)
    assert_close(matrix.count_nonzero(-1), torch.tensor([[5, 4, 3, 2, 1]]))


def test_derivatives_in_every_mode() -> None:
    x = torch.tensor([[0.3, 2.0, -1.0, 0.8], [4.0, 0.0, 0.1, -0.2]], dtype=torch.float64, requires_grad=True)
    for f in (lambda x: khot.iterative_matrix(x, 3, 0.9), lambda x: khot.soft_topk(x, 3, 0.9, method="iterative")):
        assert gradcheck(f, (x,), check_batched_grad=True, check_forward_ad=True)
        assert gradgradcheck(f, (x,))
