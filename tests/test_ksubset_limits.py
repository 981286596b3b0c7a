"""KSubset at the ends: logits of very different size, and a k that nobody checked."""

from __future__ import annotations

import pytest
import torch

from khot.distributions import KSubset

HUGE = torch.tensor([1e30, 1e30, 0.0, 1.0, 2.0, -1e30], dtype=torch.float64)
SMALL = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_logits_count_beside_huge_ones(dtype: torch.dtype) -> None:
    d, among = KSubset(3, logits=HUGE.to(dtype)), KSubset(1, logits=SMALL.to(dtype))
    z = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0]], dtype=dtype)
    torch.testing.assert_close(d.log_prob(z), torch.log_softmax(SMALL.to(dtype), -1))
    torch.testing.assert_close(d.entropy(), among.entropy())
    other = KSubset(3, logits=torch.cat([HUGE[:2], SMALL.flip(-1), HUGE[-1:]]).to(dtype))
    torch.testing.assert_close(
        torch.distributions.kl_divergence(d, other), torch.distributions.kl_divergence(among, KSubset(1, logits=SMALL.flip(-1).to(dtype)))
    )
    assert d.log_prob(torch.tensor([1.0, 0, 1, 1, 0, 0], dtype=dtype)) <= -1e29


def test_the_gradient_of_log_prob_beside_huge_logits() -> None:
    logits = HUGE.clone().requires_grad_()
    z = torch.tensor([1.0, 1, 0, 0, 1, 0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(KSubset(3, logits=logits).log_prob(z), logits)
    expected = torch.cat([torch.zeros(2), torch.tensor([0.0, 0.0, 1.0]) - torch.softmax(SMALL, -1), torch.zeros(1)]).double()
    torch.testing.assert_close(grad, expected)


def test_the_gradient_where_all_logits_are_equal() -> None:
    """The coins have odds of exactly 1 there."""
    z = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: KSubset(2, logits=x).log_prob(z), torch.zeros(4, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda x: KSubset(2, logits=x).entropy(), torch.zeros(4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("logits", [torch.randn(2, 3, dtype=torch.float64), torch.zeros(2, 0)], ids=["items", "no items"])
def test_a_k_beyond_n_is_an_error_only_where_arguments_are_validated(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="k must be between 0 and n"):
        KSubset(4, logits=logits, validate_args=True)
    d = KSubset(4, logits=logits, validate_args=False)
    everything = torch.ones_like(logits)
    torch.testing.assert_close(d.mean, everything)
    assert torch.equal(d.mode, everything) and torch.equal(d.sample(), everything)
    assert bool((d.log_prob(everything) == -torch.inf).all())
