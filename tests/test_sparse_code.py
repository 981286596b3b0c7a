"""The way of a training step that skips what is not selected gives the values and gradients of the dense one."""

import pytest
import torch
from torch import Tensor

from khot.nn import SparseAutoencoder
from khot.nn._sparse_code import combine, dense, entries, places

torch.manual_seed(0)


def step(sae: SparseAutoencoder, x: Tensor) -> list[Tensor]:
    recon, latents = sae(x)
    inputs = [parameter for parameter in sae.parameters() if parameter.requires_grad] + [x]
    weights = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    return [recon.detach(), latents.detach(), *torch.autograd.grad(recon.pow(3).sum() + (latents * weights).sum(), inputs)]


@pytest.mark.parametrize("options", [{}, {"passes": 2}, {"passes": 3, "signed": True}, {"select": "batch_topk", "passes": 2}], ids=str)
@pytest.mark.parametrize("shape", [(9, 12), (2, 5, 12), (12,)], ids=str)
def test_a_step_is_the_dense_step(options: dict, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    sae = SparseAutoencoder(12, 40, 3, **options).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    calls = []
    monkeypatch.setattr("khot.nn.sparse_autoencoder.combine", lambda *given: calls.append(1) or combine(*given))
    skipped = step(sae, x)
    assert calls
    monkeypatch.setattr(SparseAutoencoder, "_skips", lambda self, x: False)
    for found, want in zip(skipped, step(sae, x), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dead", [0, 5, 30])
def test_the_auxiliary_loss_of_a_few_dead_latents(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    sae = SparseAutoencoder(12, 40, 3, aux=True, dead_after=0).double()
    x = torch.randn(9, 12, dtype=torch.float64)
    found = []
    for skips in (True, False):
        monkeypatch.setattr(SparseAutoencoder, "_skips", lambda self, x, skips=skips: skips)
        monkeypatch.setattr(SparseAutoencoder, "_watch", lambda self, latents: self.silent.copy_(torch.arange(40) < dead))
        loss = sae.loss(x)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(sae.parameters()))])
    for sparse, want in zip(*found, strict=True):
        torch.testing.assert_close(sparse, want)


def test_products_and_their_first_and_second_derivatives() -> None:
    at = places(torch.tensor([7, 1, 3]), (2, 4))
    x, weight, rows = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3, 4), (4, 3)))
    values = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(entries(x, weight, x @ weight, at), (x @ weight).flatten()[[1, 3, 7]])
    torch.testing.assert_close(combine(values, rows, at), dense(values, at) @ rows)
    assert torch.autograd.gradcheck(lambda x, weight: entries(x, weight, (x @ weight).detach(), at), (x, weight))
    assert torch.autograd.gradcheck(lambda values, rows: combine(values, rows, at), (values, rows))
    assert torch.autograd.gradgradcheck(lambda values, rows: combine(values, rows, at), (values, rows))


def test_a_place_without_any_value_is_zero() -> None:
    nothing = places(torch.empty(0, dtype=torch.long), (2, 4))
    assert torch.equal(combine(torch.empty(0), torch.randn(4, 3), nothing), torch.zeros(2, 3))


@pytest.mark.parametrize("options", [{"method": "sigmoid"}, {"aux": True, "passes": 2}, {"k": 20}], ids=str)
def test_what_has_a_gradient_everywhere_goes_the_dense_way(options: dict) -> None:
    sae = SparseAutoencoder(12, 40, **({"k": 3} | options))
    assert not sae._skips(torch.randn(5, 12))
    assert not SparseAutoencoder(12, 40, 3).eval()._skips(torch.randn(5, 12))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not SparseAutoencoder(12, 40, 3)._skips(torch.randn(5, 12))
