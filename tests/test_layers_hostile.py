"""What a layer says to input and options that make no sense, and what it does in the corners of its trade."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from khot.nn import FeatureSelector, LearnedK, MoE, SparseAutoencoder, SparseLinear, StackedFeedForward, TopKRouter, anneal, sparsify
from tests.test_sparsify import net


@pytest.mark.parametrize("k", [2.5, 2.0, True, 0, 9, "2"])
@pytest.mark.parametrize(
    "make",
    [lambda k: FeatureSelector(8, k), lambda k: TopKRouter(4, 8, k), lambda k: SparseAutoencoder(4, 8, k)],
    ids=["selector", "router", "autoencoder"],
)
def test_k_is_a_whole_number_in_range(make: Callable[[Any], nn.Module], k: Any) -> None:
    with pytest.raises(ValueError, match=r"k must be a whole number between 1 and .*=8, got "):
        make(k)


@pytest.mark.parametrize(
    "layer",
    [FeatureSelector(8, 2), SparseLinear(8, 4, 0.5), TopKRouter(8, 4, 2), SparseAutoencoder(8, 16, 2), LearnedK(8, mean=3.0)],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("shape", [(), (3, 7), (8, 3)])
def test_a_wrong_width_is_named(layer: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="x must have 8 features in its last dimension, got shape"):
        layer(torch.ones(shape))


def test_a_selector_takes_whole_numbers_without_losing_the_mask() -> None:
    layer = FeatureSelector(4, 2)
    assert layer(torch.ones(1, 4, dtype=torch.long)).tolist() == [[0.5, 0.5, 0.5, 0.5]]
    with pytest.raises(ValueError, match="by whole numbers"):
        FeatureSelector(8, 2, always=[1.7])  # type: ignore[list-item]


def test_hardening_twice_changes_nothing() -> None:
    model = net()
    sparse = sparsify(model, density=0.1, scope="layer")
    sparse.anneal(1.0)
    sparse.harden()
    state = copy.deepcopy(model.state_dict())
    sparse.harden()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_schedule_that_starts_again_chooses_again() -> None:
    model, layer = net(), SparseLinear(6, 5, density=0.2)
    sparse = sparsify(model, density=0.1, scope="layer")
    for module, weight, mask in (
        (model, model[0].parametrizations.weight.original, sparse.masks[0]),
        (layer, layer.weight, layer),
    ):
        anneal(module, 1.0)
        old = mask.mask.clone()
        anneal(module, 0.0)
        assert bool(mask.mask.all())
        with torch.no_grad():
            weight.copy_(weight.abs().max() - weight.abs())
        anneal(module, 1.0)
        assert mask.mask.sum() == old.sum() and not torch.equal(mask.mask, old)


def test_functional_calls_go_through_the_mask() -> None:
    model = net().double()
    sparse = sparsify(model, density=0.2)
    sparse.anneal(0.3)
    x = torch.randn(3, 20, dtype=torch.float64)
    values = dict(model.named_parameters())
    found = torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).square().sum())(values)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    start = {name: value.detach() for name, value in values.items()}
    _, moved = torch.func.jvp(lambda given: torch.func.functional_call(model, given, (x,)).square().sum(), (start,), (start,))
    torch.testing.assert_close(moved, sum((start[name] * found[name]).sum() for name in start))


def test_no_tokens_cost_nothing() -> None:
    router = TopKRouter(8, 4, 2)
    routing = router.route(torch.zeros(0, 8))
    loss = routing.balance_loss() + routing.z_loss()
    loss.backward()
    assert loss == 0 and bool((router.weight.grad == 0).all())
    sae = SparseAutoencoder(8, 16, 2)
    assert sae.loss(torch.zeros(0, 8)) == 0


@pytest.mark.parametrize("rows", [1, 4])
def test_a_batch_without_variance_has_a_finite_loss(rows: int) -> None:
    sae = SparseAutoencoder(8, 16, 2)
    x = torch.randn(8).expand(rows, 8)
    loss = sae.loss(x)
    loss.backward()
    torch.testing.assert_close(loss, (x - sae(x).recon).square().sum())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in sae.parameters())


def test_autoencoders_refuse_what_they_cannot_do() -> None:
    sae = SparseAutoencoder(8, 16, 2)
    for bad, what in ((torch.zeros(4, 7), "8 features"), (torch.zeros(0, 8), "without tokens")):
        with pytest.raises(ValueError, match=what):
            sae.center(bad)
    with pytest.raises(ValueError, match="passes must be a whole number"):
        SparseAutoencoder(8, 16, 2, passes=1.5)  # type: ignore[arg-type]
    for start in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="start must be at least 1"):
            SparseAutoencoder(8, 16, 2, start=start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_in": 9}, "b_dec has shape|W_enc has shape"),
        ({"d_sae": 15}, "has shape"),
        ({"d_in": None}, "it has no d_in"),
        ({"k": None}, "it has no k"),
        ({"k": 99}, "between 1 and d_sae=16"),
    ],
    ids=str,
)
def test_files_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    pytest.importorskip("safetensors")
    SparseAutoencoder(8, 16, 2).save(tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text()) | change
    (tmp_path / "cfg.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(ValueError, match=message):
        SparseAutoencoder.load(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    sae = SparseAutoencoder(8, 16, 2)
    for text, message in (("{", "cfg.json is not JSON"), ("[]", "cfg.json must be an object with d_in, d_sae")):
        sae.save(tmp_path)
        (tmp_path / "cfg.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            SparseAutoencoder.load(tmp_path)
    sae.save(tmp_path)
    safetensors.save_file({"W_enc": torch.zeros(8, 16)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(ValueError, match="b_enc, W_dec, b_dec is missing"):
        SparseAutoencoder.load(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"sae_weights\.safetensors cannot be read"):
        SparseAutoencoder.load(tmp_path)


def test_experts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 7 numbers and the router of 8"):
        MoE(TopKRouter(8, 4, 2), StackedFeedForward(4, 7, 4))
    with pytest.raises(ValueError, match="must be at least 1, got 0, 8 and 4"):
        StackedFeedForward(0, 8, 4)
