"""Layers that were made under torch's own defaults give the same under others, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
from tests.test_defaults import other_defaults

X = torch.linspace(-1, 1, 40, dtype=torch.float32).view(5, 8).sin()
TOKENS = torch.linspace(-2, 2, 2 * 7 * 8, dtype=torch.float32).view(2, 7, 8).cos()
ENDS = torch.tensor([1, 3, 3, 5], dtype=torch.int32)
Layer = tuple[nn.Module, Callable[[nn.Module, Tensor], Any]]


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


def linears() -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(4)]


def sparsified() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    khot.nn.sparsify(model, density=0.4)
    return model


def tokens(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(TOKENS + 0 * x.sum(), 3).tokens


def router(**options: Any) -> khot.nn.TopKRouter:
    return khot.nn.TopKRouter(8, 4, 2, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "SoftTopK": (lambda: khot.nn.SoftTopK(2), plain),
    "SampleTopK": (lambda: khot.nn.SampleTopK(2), plain),
    "DifferentiableTopK": (lambda: khot.nn.DifferentiableTopK(2), plain),
    "TopKLoss": (lambda: khot.nn.TopKLoss(), lambda layer, x: layer(x, (X > 0).float())),
    "PolynomialLibrary": (lambda: khot.nn.PolynomialLibrary(8, 2), plain),
    "FourierLibrary": (lambda: khot.nn.FourierLibrary(8, (1, 2)), plain),
    "FunctionLibrary": (lambda: khot.nn.FunctionLibrary({"sin(x)": lambda s: s[..., 0].sin()}), plain),
    "SINDy": (lambda: khot.nn.SINDy(khot.nn.PolynomialLibrary(8, 2), dim=8, k=2), plain),
    "SINDy(learn_k)": (lambda: khot.nn.SINDy(khot.nn.PolynomialLibrary(8, 1), dim=8, k=2, learn_k=True), plain),
    "LearnedK": (lambda: khot.nn.LearnedK(8, 2.0), plain),
    "FeatureSelector": (lambda: khot.nn.FeatureSelector(8, 3), plain),
    "FeatureSelector(design)": (lambda: khot.nn.FeatureSelector(8, 3, design="systematic"), plain),
    "TopKRouter": (router, lambda layer, x: layer(x)[1]),
    "TopKRouter(bias)": (lambda: router(bias=True), lambda layer, x: layer(x)[1]),
    "TopKRouter(design)": (lambda: router(design="pivotal"), lambda layer, x: layer(x)[1]),
    "TopKRouter(expert)": (lambda: router(choice="expert"), lambda layer, x: layer.route(x).weights),
    "MoE": (lambda: khot.nn.MoE(router(), linears()), plain),
    "MoE(capacity)": (lambda: khot.nn.MoE(router(), linears(), capacity=1.0), plain),
    "MoE(stacked)": (lambda: khot.nn.MoE(router(), khot.nn.StackedFeedForward(4, 8, 6)), plain),
    "MoE.losses": (lambda: khot.nn.MoE(router(), linears()), lambda layer, x: layer(x).routing.balance_loss() + layer(x).routing.z_loss()),
    "StackedFeedForward": (lambda: khot.nn.StackedFeedForward(4, 8, 6), lambda layer, x: layer(x, ENDS)),
    "SparseLinear": (lambda: khot.nn.SparseLinear(8, 6, 0.4), plain),
    "sparsify": (sparsified, plain),
    "SparseAutoencoder": (lambda: khot.nn.SparseAutoencoder(8, 16, 3), plain),
    "SparseAutoencoder(batch)": (lambda: khot.nn.SparseAutoencoder(8, 16, 3, select="batch_topk"), plain),
    "SparseAutoencoder(loss)": (lambda: khot.nn.SparseAutoencoder(8, 16, 3, aux=True), lambda layer, x: layer.loss(x)),
    "TokenTopK(learned)": (lambda: khot.nn.TokenTopK(score="learned", dim=8), tokens),
    "TokenTopK(sample)": (lambda: khot.nn.TokenTopK(score="learned", dim=8, gradient="sample"), tokens),
    "TokenTopK(gumbel)": (lambda: khot.nn.TokenTopK(score="learned", dim=8, gradient="gumbel", fuse=True), tokens),
    "TokenTopK(soft)": (lambda: khot.nn.TokenTopK(score="learned", dim=8, gradient="soft"), tokens),
    "TokenTopK(random)": (lambda: khot.nn.TokenTopK(score="random"), tokens),
    "Dictionary": (lambda: khot.nn.Dictionary(8, 12, 3), plain),
    "SoftKNN": (lambda: khot.nn.SoftKNN(2), lambda layer, x: layer(x, X.flip(0))),
}


def evaluate(layer: nn.Module, call: Callable[[Any, Tensor], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    layer.zero_grad()
    x = X.clone().requires_grad_()
    out = call(layer, x)
    if out.requires_grad:
        (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum().backward()
    grads = [parameter.grad for parameter in (x, *layer.parameters()) if parameter.grad is not None]
    return [out.detach(), *(grad.clone() for grad in grads), *(buffer.clone() for buffer in layer.buffers())]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_does_not_depend_on_the_defaults(name: str, training: bool) -> None:
    make, call = LAYERS[name]
    found = []
    for others in (False, True):
        torch.manual_seed(1)
        layer = make().train(training)
        if others:
            with other_defaults():
                found.append(evaluate(layer, call))
        else:
            found.append(evaluate(layer, call))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)  # device and dtype too; a threshold that is not known yet is nan


def test_every_layer_is_in_the_table() -> None:
    modules = {name for name, value in vars(khot.nn).items() if isinstance(value, type) and issubclass(value, nn.Module)}
    assert modules - {"Sparsifier", "Library"} <= {name.split("(")[0] for name in LAYERS}  # sparsify makes the first; the second is a base
