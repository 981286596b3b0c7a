"""Sparse networks: the budget, the freezing, the way back to plain modules."""

import contextlib
import copy
import importlib
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from khot import kernels
from khot.nn import SparseLinear, anneal, sparsify, to_csr
from khot.nn.annealing import share_of
from khot.nn.csr import CSRLinear

sparsify_module = importlib.import_module("khot.nn.sparsify")  # the function of that name hides it


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 3))


def data(n: int = 256) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 20)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def train(model: nn.Module, sparse: khot.nn.Sparsifier, steps: int = 150) -> None:
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    for step in range(steps):
        anneal(model, step / steps)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def count(model: nn.Module) -> int:
    return sum(int(m.weight.count_nonzero()) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


@pytest.mark.parametrize("options", [{}, {"scores": "learned"}, {"hard": True}, {"scope": "layer"}, {"method": "euclidean"}], ids=str)
def test_training_ends_with_exactly_the_budget_and_still_knows_the_answer(options: dict) -> None:
    model = net()
    names = list(model.state_dict())
    sparse = sparsify(model, density=0.1, **options)
    train(model, sparse)
    x, y = data(1000)
    before = model.eval()(x)
    assert sum(part.kept for part in sparse.report().values()) == 192  # 10 % of 1920, in spite of momentum after the freeze
    sparse.harden()
    assert count(model) == 192 and list(model.state_dict()) == names and type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), before)
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert (before.argmax(-1) == y).float().mean() > 0.7


def test_density_falls_along_a_cubic_and_masks_sum_to_the_budget() -> None:
    model = net()
    sparse = sparsify(model, density=0.1, until=0.5)
    for progress, density in ((0.0, 1.0), (0.25, 0.1 + 0.9 / 8), (0.5, 0.1), (1.0, 0.1)):
        anneal(model, progress)
        assert sparse.density == pytest.approx(density)
        total = sum(float(mask.detach().sum()) for mask in sparse._masks())
        assert total == pytest.approx(round(density * 1920), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"hard": True}], ids=["at once", "plain"])
def test_one_mask_is_solved_in_each_forward(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    model, calls = net(), []
    sparse = sparsify(model, density=0.1, **options)
    at_once, plainly = sparsify_module.multiply, sparse._masks
    monkeypatch.setattr(sparsify_module, "multiply", lambda *args, **more: calls.append("at once") or at_once(*args, **more))
    monkeypatch.setattr(sparse, "_masks", lambda: calls.append("plain") or plainly())
    sparse.anneal(0.3)
    out = model(torch.randn(4, 20))
    wanted = ["plain"] if options else ["at once"] if kernels.available() else ["at once", "plain"]  # which may find that it cannot
    assert calls == wanted and not sparse.current
    part = model[0](torch.randn(4, 20))  # a layer by itself works as well
    assert calls == [*wanted, "plain"] and part.shape == (4, 30)
    (out.sum() + part.sum()).backward()


@pytest.mark.parametrize("native", [True, False])
def test_a_mask_is_kept_for_some_passes_without_its_gradient(native: bool) -> None:
    model, x = net(), torch.randn(5, 20)
    sparse = sparsify(model, density=0.1, every=3)
    sparse.anneal(0.2)
    weight = model[0].parametrizations.weight.original
    with contextlib.nullcontext() if native else kernels.disabled():
        for turn in range(6):
            with torch.no_grad():
                weight.add_(torch.randn_like(weight))
            sparse.begin()
            product, fresh = sparse.current[0], sparse._masks()[0]
            assert torch.allclose(product, weight * fresh, rtol=1e-4) == (turn % 3 == 0)
            (got,) = torch.autograd.grad(product.sum(), weight)
            assert torch.equal(got, sparse.last[0]) == (turn % 3 != 0)
            sparse.end()
    model.eval()
    assert model(x).shape and sum(kept.kept for kept in sparse.report().values()) == share_of(sparse.total, 0.1)


def test_a_frozen_mask_follows_its_buffer() -> None:
    model = net()
    sparse = sparsify(model, density=0.1, scope="layer")
    sparse.anneal(1.0)
    x = torch.randn(4, 20)
    model(x)
    state = {name: torch.ones_like(value) if name.endswith("mask") else value for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    torch.testing.assert_close(model[0].weight, model[0].parametrizations.weight.original)
    assert model.double()[0].weight.dtype == torch.float64
    with torch.inference_mode():
        assert copy.deepcopy(model)(x.double()).shape == (4, 3)


def test_gradients_are_those_of_the_formula() -> None:
    model = net().double()
    sparse = sparsify(model, density=0.2, tau=0.5)
    sparse.anneal(0.4)
    x = torch.randn(6, 20, dtype=torch.float64)
    weights = [module.parametrizations.weight.original for module in sparse.modules]
    got = torch.autograd.grad(model(x).square().sum(), weights)
    flat = torch.cat([weight.abs().flatten() for weight in weights])
    k = round(sparse.density * 1920)
    masks = khot.soft_topk(flat / (flat.detach().std(correction=0) * sparse.masks[0].tau), k).split([600, 1200, 120])
    hidden = x
    for index, (weight, mask) in enumerate(zip(weights, masks, strict=True)):
        hidden = F.linear(hidden, weight * mask.view_as(weight), model[2 * index].bias)
        hidden = hidden.relu() if index < 2 else hidden
    torch.testing.assert_close(got, torch.autograd.grad(hidden.square().sum(), weights))


def test_state_dict_round_trip_keeps_a_frozen_choice() -> None:
    model = net()
    sparse = sparsify(model, density=0.1)
    train(model, sparse)
    other = net()
    again = sparsify(other, density=0.1)
    other.load_state_dict(model.state_dict())
    again.anneal(0.9)
    x = torch.randn(5, 20)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)
    with torch.no_grad():
        copied[0].parametrizations.weight.original.zero_()
    assert model(x).std() > 0 and count(model) == 192


def test_deepcopy_while_choosing_is_independent() -> None:
    model = net()
    sparse = sparsify(model, density=0.1)
    sparse.anneal(0.3)
    copied = copy.deepcopy(model)
    x = torch.randn(5, 20)
    want = model(x)
    anneal(copied, 0.6)
    torch.testing.assert_close(model(x), want)
    assert not torch.allclose(copied(x), want)


def test_convolutions_exclusions_and_an_even_density() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
    sparse = sparsify(model, density=0.25, exclude=["2"])
    sparse.anneal(1.0)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10) and list(sparse.report()) == ["0"]
    sparse.harden()
    assert model[0].weight.count_nonzero() == 54 and model[2].weight.count_nonzero() == 2880


def test_a_collapsed_layer_is_warned_about() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    sparse = sparsify(model, density=0.1)
    with pytest.warns(UserWarning, match="layer '2' has no weight left"):
        sparse.anneal(1.0)
    assert next(iter(sparse.report().items())) == ("2", (0, 1200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify(net(), density=0.5).anneal(1.0)


@pytest.mark.parametrize("training", [True, False])
def test_compiles_as_one_graph(training: bool) -> None:
    model = net().train(training)
    sparse = sparsify(model, density=0.1)
    sparse.anneal(0.3)
    x = torch.randn(5, 20)
    want = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)


@pytest.mark.parametrize("bias", [True, False])
def test_csr_gives_the_same_output(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(50, 40, bias=bias), nn.ReLU(), nn.Sequential(nn.Linear(40, 30)), nn.Linear(30, 4))
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(40, 50) < 0.05)
        model[2][0].weight.mul_(torch.rand(30, 40) < 0.05)
    x = torch.randn(2, 3, 50)
    want = model(x)
    fast = to_csr(model)
    assert isinstance(fast[0], CSRLinear) and isinstance(fast[2][0], CSRLinear) and type(fast[3]) is nn.Linear
    torch.testing.assert_close(fast(x), want)
    assert fast(torch.zeros(0, 50)).shape == (0, 4)
    with pytest.raises(ValueError, match="50 features"):
        fast(torch.zeros(2, 51))


def test_sparse_linear_learns_and_becomes_plain() -> None:
    x = torch.randn(300, 30)
    y = 2 * x[:, 3] - 3 * x[:, 8]
    layer = SparseLinear(30, 1, density=2 / 30, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for step in range(300):
        anneal(layer, step / 300)
        loss = (layer(x).squeeze(-1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    plain = layer.to_linear()
    assert plain.weight.detach().nonzero()[:, 1].tolist() == [3, 8] and layer.count == 2
    torch.testing.assert_close(plain(x), layer(x))


def test_errors() -> None:
    for bad in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="density must lie in"):
            sparsify(net(), density=bad)
        with pytest.raises(ValueError, match="density must lie in"):
            SparseLinear(3, 3, density=bad)
    with pytest.raises(ValueError, match="no Linear or Conv"):
        sparsify(nn.ReLU(), density=0.5)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        sparsify(net(), density=0.5, every=0)
    with pytest.raises(ValueError, match="named_modules"):
        sparsify(net(), density=0.5, exclude=["7"])
    with pytest.raises(ValueError, match="scores must be 'magnitude' or 'learned'"):
        sparsify(net(), density=0.5, scores="size")  # type: ignore[arg-type]
    model = net()
    sparsify(model, density=0.5)
    with pytest.raises(ValueError, match="parametrized already"):
        sparsify(model, density=0.5)
