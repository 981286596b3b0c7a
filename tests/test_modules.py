"""Modules hold the state of the functions: the same results, the same errors, and numbers that are saved with the model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import khot

SCORES = torch.tensor([[3.0, 1.0, 2.0, 0.5], [0.0, 4.0, 1.0, 2.0]])


def halves(scores: Tensor, k: float, tau: float, *, gain: float = 1.0) -> Tensor:
    """A method of the user's own, along the last dimension."""
    return torch.sigmoid(gain * scores / tau)


def test_a_callable_method_is_hardened_and_takes_any_dim() -> None:
    layer = khot.nn.SoftTopK(1, 0.5, method=halves, hard=True, dim=0, gain=2.0)
    scores = SCORES.clone().requires_grad_()
    mask = layer(scores)
    assert torch.equal(mask, khot.topk_mask(SCORES, 1, dim=0))
    mask.sum().backward()
    soft = torch.sigmoid(2 * SCORES / 0.5)
    torch.testing.assert_close(scores.grad, 4 * soft * (1 - soft))
    torch.testing.assert_close(khot.soft_topk(SCORES, 1, 0.5, method=halves, dim=0, gain=2.0), soft)


def test_a_method_that_is_neither_name_nor_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a name in khot\.RELAXATIONS or a function"):
        khot.soft_topk(SCORES, 1, method=3)  # type: ignore[arg-type]


def test_the_smallest_are_the_largest_of_the_negative() -> None:
    for name, row in khot.RELAXATIONS.items():
        if row.deterministic:
            torch.testing.assert_close(khot.soft_topk(SCORES, 2, method=name, largest=False), khot.soft_topk(-SCORES, 2, method=name))
    least = khot.soft_topk_matrix(SCORES, 2, 1e-3, hard=True, largest=False)
    assert least.argmax(-1).tolist() == [[3, 1], [0, 2]]


@pytest.mark.parametrize("kind", [khot.nn.SoftTopK, khot.nn.SampleTopK])
def test_misspelt_options_are_refused_at_construction(kind) -> None:
    with pytest.raises(TypeError, match="method 'entmax' has no option 'alhpa'; its options: alpha"):
        kind(2, method="entmax", alhpa=1.5)
    with pytest.raises(TypeError, match="design 'systematic' has no option 'ordr'"):
        khot.nn.SampleTopK(2, design_options={"ordr": "fixed"})


def test_samples_and_evaluation_have_one_shape() -> None:
    layer = khot.nn.SampleTopK(2, num_samples=3, design_options={"order": "fixed"})
    assert layer(SCORES).shape == layer.eval()(SCORES).shape == (3, 2, 4)
    assert torch.equal(layer(SCORES)[1], khot.topk_mask(SCORES, 2))


def test_numbers_are_saved_with_the_model() -> None:
    kept = khot.nn.SoftTopK(torch.tensor(2.5), torch.nn.Parameter(torch.tensor(0.7)))
    assert [name for name, _ in kept.named_buffers()] == ["k"]
    assert [name for name, _ in kept.named_parameters()] == ["tau"]
    fresh = khot.nn.SoftTopK(torch.tensor(0.0), torch.nn.Parameter(torch.tensor(1.0)))
    fresh.load_state_dict(kept.state_dict())
    torch.testing.assert_close(fresh(SCORES), kept(SCORES))
    assert kept.double()(SCORES.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "layer",
    [
        khot.nn.SoftTopK(2, method="entmax", alpha=1.25),
        khot.nn.SampleTopK(torch.tensor([1.0, 2.5])),
        khot.nn.TopKLoss(torch.tensor(0.5)),
        khot.nn.DifferentiableTopK(2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_modules_copy_pickle_and_show_what_they_hold(layer: torch.nn.Module) -> None:
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(again) == repr(layer) != f"{type(layer).__name__}()"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", khot.RELAXATIONS)
def test_other_kinds_of_tensor_are_refused_in_words(name: str) -> None:
    rows = [torch.randn(3), torch.randn(2)]
    cases = [
        (torch.randn(3, 4).to_sparse(), "must be a dense tensor"),
        (torch.nested.nested_tensor(rows), "must not be a nested tensor"),
        (torch.nested.nested_tensor(rows, layout=torch.jagged), "must not be a nested tensor"),
        (torch.randn(4).to(torch.float8_e4m3fn), "must be float16, bfloat16, float32 or float64"),
        (torch.arange(4), "must be of a floating dtype, got torch.int64; convert with scores.float"),
    ]
    for scores, message in cases:
        with pytest.raises(TypeError, match=message):
            khot.soft_topk(scores, 1, method=name)


def test_what_is_exported_is_what_is_imported_by_name() -> None:
    assert {"soft_topk", "RELAXATIONS", "nn", "sigmoid_topk"} <= set(khot.__all__)
    assert not {"checks", "registry", "primitives", "soft"} & set(khot.__all__)
    for name in khot.__all__:
        assert hasattr(khot, name)
