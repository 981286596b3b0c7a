"""The sampled mask where it is differentiated twice or runs under autocast; other modes are in tests/kernels/test_sampling.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

import khot


def second(mask: Tensor, leaf: Tensor) -> Tensor:
    (first,) = torch.autograd.grad((mask * torch.arange(6.0, dtype=torch.float64)).sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)[0]


def test_second_derivative_is_that_of_the_soft_mask() -> None:
    leaf = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_close(second(khot.sample_topk(leaf, 2), leaf), second(khot.soft_topk(leaf, 2), leaf))


def test_autocast_draws_exactly_k_and_keeps_the_dtype() -> None:
    leaf = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = khot.sample_topk(leaf, 7)
    assert z.dtype == leaf.dtype and bool((z.sum(-1) == 7).all())
    (grad,) = torch.autograd.grad((z * torch.arange(50.0)).sum(), leaf)
    assert_close(grad, torch.autograd.grad((khot.soft_topk(leaf, 7) * torch.arange(50.0)).sum(), leaf)[0])
