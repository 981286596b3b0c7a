"""Laws that every layer keeps: one row here puts a new layer into all of them."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
from khot import kernels


@dataclass(frozen=True)
class Row:
    make: Callable[[], nn.Module]
    features: int
    learns: str  # the parameter that the selection must give a gradient to
    out: Callable[[Any], Tensor] = lambda result: result
    fullgraph: bool = True  # False: shapes depend on the data


def autoencoder(fullgraph: bool = True, **options: Any) -> Row:
    return Row(lambda: khot.nn.SparseAutoencoder(12, 24, **copy.deepcopy(options)), 12, "W_enc", lambda coded: coded.recon, fullgraph)


LAYERS = {
    "FeatureSelector": Row(lambda: khot.nn.FeatureSelector(12, k=3), 12, "scores"),
    "FeatureSelector hard": Row(lambda: khot.nn.FeatureSelector(12, k=3, hard=True, method="gaussian"), 12, "scores"),
    "FeatureSelector sampled": Row(lambda: khot.nn.FeatureSelector(12, k=3, design="systematic", always=[5]), 12, "scores"),
    "Dictionary": Row(lambda: khot.nn.Dictionary(12, 30, k=3), 12, "atoms"),
    "LearnedK": Row(lambda: khot.nn.LearnedK(12, mean=3), 12, "weight"),
    "TopKRouter": Row(lambda: khot.nn.TopKRouter(12, 6, k=2), 12, "weight", lambda gate: gate.weights),
    "TopKRouter soft": Row(lambda: khot.nn.TopKRouter(12, 6, k=2, hard=False, bias=True), 12, "weight", lambda gate: gate.weights),
    "MoE stacked": Row(
        lambda: khot.nn.MoE(khot.nn.TopKRouter(12, 6, k=2), khot.nn.StackedFeedForward(6, 12, 16)),
        12,
        "router.weight",
        lambda out: out.values,
    ),
    "MoE listed": Row(
        lambda: khot.nn.MoE(khot.nn.TopKRouter(12, 6, k=2), [nn.Linear(12, 4) for _ in range(6)]),
        12,
        "router.weight",
        lambda out: out.values,
        fullgraph=False,
    ),
    "SparseLinear": Row(lambda: khot.nn.SparseLinear(12, 5, density=0.3), 12, "weight"),
    "SparseLinear hard": Row(lambda: khot.nn.SparseLinear(12, 5, density=0.3, hard=True, bias=False, method="euclidean"), 12, "weight"),
    "SparseAutoencoder": autoencoder(k=3),
    "SparseAutoencoder relaxed": autoencoder(k=3, method="sigmoid"),
    "SparseAutoencoder batch": autoencoder(fullgraph=False, k=3, select="batch_topk", passes=2),
    "SparseAutoencoder learned k": autoencoder(k=khot.nn.LearnedK(12, mean=3)),
    "SparseAutoencoder sampled": autoencoder(k=3, method="euclidean", design="systematic", signed=True),
}
EVERY = pytest.mark.parametrize("row", LAYERS.values(), ids=LAYERS.keys())


def build(row: Row) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = row.make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    khot.nn.anneal(layer, 0.1)
    return layer, torch.randn(7, row.features)


@EVERY
def test_gradient_reaches_what_selects(row: Row) -> None:
    layer, x = build(row)
    out = row.out(layer(x))
    (out * torch.randn_like(out)).sum().backward()
    grad = layer.get_parameter(row.learns).grad
    assert grad is not None and grad.isfinite().all() and grad.abs().sum() > 0


@EVERY
def test_evaluation_is_deterministic_and_independent_of_progress(row: Row) -> None:
    layer, x = build(row)
    layer.eval()
    first = row.out(layer(x))
    khot.nn.anneal(layer, 1.0)
    torch.testing.assert_close(row.out(layer(x)), first, rtol=0, atol=0)


@EVERY
def test_state_dict_deepcopy_and_pickle_keep_the_layer(row: Row) -> None:
    layer, x = build(row)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = row.make()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    khot.nn.anneal(loaded, 0.1)
    for other in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for mode in (True, False):
            torch.manual_seed(1)
            want = row.out(layer.train(mode)(x))
            torch.manual_seed(1)
            torch.testing.assert_close(row.out(other.train(mode)(x)), want, rtol=0, atol=0)


@EVERY
@pytest.mark.parametrize("training", [True, False])
def test_compiles(row: Row, training: bool) -> None:
    layer, x = build(row)
    layer.train(training)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=row.fullgraph)
    with kernels.disabled():  # native code draws other samples from the same seed, and compilers do not run it
        torch.manual_seed(1)
        want = row.out(layer(x))
        torch.manual_seed(1)
        torch.testing.assert_close(row.out(compiled(x)), want)


@EVERY
def test_a_falling_temperature_does_not_compile_again(row: Row) -> None:
    layer, x = build(row)
    if not isinstance(layer, khot.nn.annealing.Annealed):
        pytest.skip("no temperature")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=row.fullgraph)
    for progress in (0.0, 0.1, 0.2, 0.3):
        khot.nn.anneal(layer, progress)
        compiled(x)
    assert counter.frame_count == 1


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_runs_in_other_dtypes_and_under_autocast(row: Row, dtype: torch.dtype) -> None:
    layer, x = build(row)
    if dtype == torch.float64:
        assert row.out(layer.double()(x.double())).dtype in (torch.float64, torch.float32)
        return
    with torch.autocast("cpu", dtype=dtype):
        out = row.out(layer(x))
    assert out.isfinite().all()
    out.float().sum().backward()
    assert layer.get_parameter(row.learns).grad.isfinite().all()


@EVERY
def test_empty_and_leading_dimensions(row: Row) -> None:
    layer, _ = build(row)
    assert row.out(layer.eval()(torch.zeros(0, row.features))).shape[0] == 0
    x = torch.randn(2, 5, row.features)
    flat = row.out(layer(x.flatten(0, 1)))
    torch.testing.assert_close(row.out(layer(x)).reshape(flat.shape), flat)


@EVERY
def test_a_wrong_width_says_which(row: Row) -> None:
    layer, _ = build(row)
    with pytest.raises(ValueError, match=f"{row.features}"):
        layer(torch.zeros(3, row.features + 1))
