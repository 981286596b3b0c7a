"""Weights times their mask at once: equal to the plain way, whatever is asked of it, in memory that is used again."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from khot import kernels
from khot.nn import _masked, sparsify
from tests.test_sparsify import net


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are kept for these small weights too."""
    monkeypatch.setattr(_masked, "WORTH", 1)


def both_ways(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What comes out with native code, where there is any, and without."""
    with kernels.disabled():
        plain = work()
    return work(), plain


@pytest.mark.parametrize("method", ["sigmoid", "euclidean", "gaussian", "laplace", "entmax"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_products_at_once_are_those_of_the_plain_way(method: str, scope: str) -> None:
    model = net().double()
    sparse = sparsify(model, density=0.1, method=method, scope=scope)
    sparse.anneal(0.4)
    x = torch.randn(6, 20, dtype=torch.float64)
    weights = [module.parametrizations.weight.original for module in sparse.modules]

    def work() -> Any:
        out = model(x)
        return out, torch.autograd.grad(out.square().sum(), weights)

    torch.testing.assert_close(*both_ways(work), rtol=1e-9, atol=1e-12)


def test_products_at_once_take_everything_that_the_plain_way_takes() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 2), nn.Linear(5, 5)).double()
    model[1].to(memory_format=torch.channels_last)
    sparse = sparsify(model, density=0.3)
    sparse.anneal(0.3)
    model[0].parametrizations.weight.original.requires_grad_(False)  # one that does not learn; the last of the five is not used
    model.forward = lambda x: nn.Sequential.forward(model[:4], x)
    weights = [model[i].parametrizations.weight.original for i in (1, 3, 4)]
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)

    def work() -> Any:
        first, second = model(x), model(2 * x)  # two passes before the way back: neither may write over the other's mask
        with torch.no_grad():
            model(3 * x)
        loss = (first * second).sum()
        once = torch.autograd.grad(loss, weights, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, weights, retain_graph=True), once, rtol=0, atol=0)
        inner = torch.autograd.grad(loss, weights, create_graph=True)
        torch.testing.assert_close(inner, once)
        return first, once, torch.autograd.grad(sum(part.square().sum() for part in inner), weights)

    torch.testing.assert_close(*both_ways(work), rtol=1e-9, atol=1e-12)


def test_buffers_are_used_again_and_stay_with_their_model() -> None:
    model = net()
    sparse = sparsify(model, density=0.1)
    sparse.anneal(0.3)
    x = torch.randn(4, 20)
    for _ in range(5):
        loss = model(x).sum()
        loss.backward()
    seen = [flat.data_ptr() for flat in sparse.room.buffers]
    weight, kept = model[0].weight, model[0].weight.clone()  # what somebody keeps is not written over
    array, same = model[2].parametrizations.weight.original.grad.numpy(), model[2].parametrizations.weight.original.grad.clone()
    for _ in range(5):
        model.zero_grad()
        loss = model(2 * x).sum()
        loss.backward()
    assert [flat.data_ptr() for flat in sparse.room.buffers[: len(seen)]] == seen and len(sparse.room.buffers) <= len(seen) + 4
    assert torch.equal(weight, kept) and torch.equal(torch.from_numpy(array), same)
    assert not copy.deepcopy(model)[0].parametrizations.weight[0].group.room.buffers
    sparse.anneal(1.0)
    assert not sparse.room.buffers
