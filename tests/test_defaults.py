"""torch's default device and dtype are the caller's own: no result depends on them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot import kernels
from khot.registry import DESIGNS, RELAXATIONS

SOURCE = Path(khot.__file__).parent
# Functions of torch that make a tensor from no tensor. Each takes a default device and dtype unless told.
NAMES = "empty zeros ones full arange linspace logspace eye tensor as_tensor scalar_tensor rand randn randint randperm normal"
FACTORIES = {f"torch.{name}" for name in NAMES.split()}


MODULES = {"nn", "models", "sklearn", "train"}  # the state of a module is the caller's own and follows the defaults, as torch's does


def allocations(path: Path) -> Iterator[ast.Call]:
    """The tensors that a file makes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES:
            yield node


def test_every_allocation_names_its_device_and_dtype() -> None:
    bare = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in MODULES
        for call in allocations(path)
        if not {"device", "dtype"} <= {keyword.arg for keyword in call.keywords}
    ]
    assert not bare


SCORES = torch.tensor([[0.3, -1.0, 2.0, 0.7, 0.1, 1.4], [1.0, 1.0, -0.5, 0.2, 3.0, 0.0]], dtype=torch.float32)
ROWS = torch.linspace(-1, 1, 48, dtype=torch.float32).view(2, 6, 4)
WEIGHTS = torch.linspace(0, 1, 6, dtype=torch.float32)
TARGET = torch.tensor([[1.0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.float32)
PROBS = torch.tensor([[0.5, 0.25, 0.75, 0.5, 0.6, 0.4]], dtype=torch.float32)


def objective(z: Tensor) -> Tensor:
    return z @ WEIGHTS


def made(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A module made under torch's own defaults, the same every time, to be run under others."""
    torch.manual_seed(0)
    return build().eval()


def public() -> dict[str, Callable[[Tensor], Any]]:
    """Everything public, as a function of float32 scores."""
    calls: dict[str, Callable[[Tensor], Any]] = {
        "topk_mask": lambda s: khot.topk_mask(s, 2),
        "gather_topk": lambda s: khot.gather_topk(ROWS, s, 2).values,
        "straight_through": lambda s: khot.straight_through(khot.topk_mask(s, 2), khot.soft_topk(s, 2)),
        "soft_topk(hard)": lambda s: khot.soft_topk(s, 2, hard=True),
        "soft_rank": lambda s: khot.soft_rank(s, 0.5),
        "soft_rank(kl)": lambda s: khot.soft_rank(s, 0.5, regularization="kl"),
        "soft_sort": khot.soft_sort,
        "soft_sort(kl)": lambda s: khot.soft_sort(s, regularization="kl"),
        "magnitude_topk": lambda s: khot.magnitude_topk(s, 2),
        "certify_topk": lambda s: khot.certify_topk(s - 0.1, s + 0.1, 2).kept.float(),
        "heaviside": lambda s: khot.linear_bounds.heaviside(s - 0.1, s + 0.1).upper_slope,
        "delta": lambda s: khot.linear_bounds.delta(s - 0.1, s + 0.1).upper_slope,
        "topk_value": lambda s: khot.topk_value(s, 2),
        "topk_inverse": lambda s: khot.topk_inverse(s.sigmoid()),
        "log_soft_topk": lambda s: khot.log_soft_topk(s, 2),
        "log_soft_topk(entmax)": lambda s: khot.log_soft_topk(s, 2, 4.0, method="entmax").exp(),
        "select_topk_with_indices": lambda s: khot.select_topk_with_indices(ROWS, s, 2).values,
        "entmax_topk(alpha)": lambda s: khot.entmax_topk(s, 2, alpha=s.new_tensor([1.2, 1.8])),
        "topk_loss": lambda s: khot.topk_loss(s, TARGET),
        "sample_topk": lambda s: khot.sample_topk(s, 2),
        "DifferentiableTopK": lambda s: khot.nn.DifferentiableTopK(2)(s),
        "SoftTopK": lambda s: khot.nn.SoftTopK(2)(s),
        "SampleTopK": lambda s: khot.nn.SampleTopK(2)(s),
        "TopKLoss": lambda s: khot.nn.TopKLoss()(s, TARGET),
    }
    selector, learned = made(lambda: khot.nn.FeatureSelector(6, 2)), made(lambda: khot.nn.LearnedK(6, 2.0))
    calls["FeatureSelector"] = lambda s: selector(s)
    calls["LearnedK"] = lambda s: learned(s)
    image = torch.linspace(-1, 1, 28 * 28, dtype=torch.float32).view(1, 1, 28, 28)
    for name in khot.models.MODELS:
        model = made(lambda name=name: khot.models.create_model(name, preset="tiny", depth=2))
        calls[f"models.{name}"] = lambda s, model=model: model(image + 0 * s.sum())
    for name, row in RELAXATIONS.items():
        calls[f"soft_topk[{name}]"] = lambda s, name=name: khot.soft_topk(s, 2, 0.5, method=name)
        if row.matrix is not None:
            calls[f"soft_topk_matrix[{name}]"] = lambda s, name=name: khot.soft_topk_matrix(s, 2, 0.5, method=name)
            calls[f"select_topk[{name}]"] = lambda s, name=name: khot.select_topk(ROWS, s, 2, 0.5, method=name)
    for name in DESIGNS:
        calls[f"sample[{name}]"] = lambda s, name=name: khot.sample(PROBS, design=name) + 0 * s
    for name, estimator in khot.estimators.ESTIMATORS.items():
        calls[f"estimators.{name}"] = lambda s, estimator=estimator: estimator(objective, s, 2)
    for name in ("mean", "variance", "mode", "joint", "covariance"):
        calls[f"KSubset.{name}"] = lambda s, name=name: getattr(khot.distributions.KSubset(2, logits=s), name)
    calls["KSubset.entropy"] = lambda s: khot.distributions.KSubset(2, logits=s).entropy()
    calls["KSubset.log_prob"] = lambda s: khot.distributions.KSubset(2, logits=s).log_prob(TARGET)
    calls["KSubset.sample"] = lambda s: khot.distributions.KSubset(2, logits=s).sample()
    calls["KSubset.rsample"] = lambda s: khot.distributions.KSubset(2, logits=s).rsample()
    return calls


CALLS = public()


@contextmanager
def other_defaults() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        _mend_default_device()


def _mend_default_device() -> None:
    """``torch.get_default_device`` of torch 2.6 fails once a default device was set and taken back."""
    try:
        torch.get_default_device()
    except AttributeError:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def evaluate(call: Callable[[Tensor], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    scores = SCORES.clone().requires_grad_()
    out = call(scores)
    grads = torch.autograd.grad(out.sum(), scores) if out.requires_grad else ()
    return [out.detach(), *grads]


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_defaults(name: str, native: bool) -> None:
    def both() -> None:
        expected = evaluate(CALLS[name])
        with other_defaults():
            found = evaluate(CALLS[name])
        torch.testing.assert_close(found, expected)  # device and dtype too

    if native:
        both()
    else:
        with kernels.disabled():
            both()
