"""The table of transforms over the public functions that are no row of a registry: losses, ranks, logarithms.

Relaxations are in tests/test_transforms.py, designs in tests/test_design_transforms.py, estimators in tests/test_estimator_transforms.py,
KSubset in tests/test_ksubset_transforms.py; the last test here names them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot
from tests.laws import assert_derivative_in_every_mode, dynamic_export, spaced


@dataclass(frozen=True)
class Row:
    """A public function of scores ``(..., n)``, and what it cannot keep."""

    call: Callable[[Tensor], Tensor]
    double_backward: bool = True
    forward_mode: bool = True
    quick: bool = True  # to compile and to export


def goal(scores: Tensor) -> Tensor:
    """A target of k = 2 for scores of any shape: the first two items."""
    return (torch.arange(scores.shape[-1], device=scores.device) < 2).to(scores.dtype).expand(scores.shape)


def items(scores: Tensor) -> Tensor:
    """Two features of every item, ``(..., n, 2)``."""
    return torch.stack((scores.sin(), scores.cos()), -1)


def layer(scores: Tensor) -> Tensor:
    return khot.nn.TopKLoss(0.7, reduction="none")(scores, goal(scores))


TABLE = {
    "topk_value": Row(lambda s: khot.topk_value(s, 2, 0.7)),
    "topk_value(euclidean)": Row(lambda s: khot.topk_value(s, 2, 0.7, method="euclidean")),
    "topk_inverse": Row(lambda s: khot.topk_inverse(s.sigmoid(), 0.7)),
    "topk_loss": Row(lambda s: khot.topk_loss(s, goal(s), 0.7, reduction="none")),
    "topk_loss(gaussian)": Row(lambda s: khot.topk_loss(s, goal(s), 0.7, method="gaussian", reduction="none")),
    "nn.TopKLoss": Row(layer),
    "soft_rank": Row(lambda s: khot.soft_rank(s, 0.7)),
    "soft_rank(kl)": Row(lambda s: khot.soft_rank(s, 0.7, regularization="kl")),
    "soft_sort": Row(lambda s: khot.soft_sort(s, 0.7)),
    "soft_sort(kl)": Row(lambda s: khot.soft_sort(s, 0.7, regularization="kl")),
    "log_soft_topk": Row(lambda s: khot.log_soft_topk(s, 2, 0.7), quick=False),
    "magnitude_topk": Row(lambda s: khot.magnitude_topk(s, 2), quick=False),
    "select_topk": Row(lambda s: khot.select_topk(items(s), s, 2, 0.7)),
    "select_topk(sigmoid)": Row(lambda s: khot.select_topk(items(s), s, 2, 0.7, method="sigmoid")),
    "select_topk_with_indices": Row(lambda s: khot.select_topk_with_indices(items(s), s, 2, 0.7).values, quick=False),
    "gather_topk": Row(lambda s: khot.gather_topk(items(s), s.detach(), 2).values),
    "entmax_topk(alpha=1.3)": Row(lambda s: khot.entmax_topk(s, 2, 0.7, alpha=1.3)),
}
HARD = {  # the value of one function, the derivative of another
    "soft_topk(hard)": (lambda s: khot.soft_topk(s, 2, 0.7, hard=True), lambda s: khot.soft_topk(s, 2, 0.7)),
    "straight_through": (lambda s: khot.straight_through(goal(s), s.sin()), torch.sin),
    "select_topk(hard)": (lambda s: khot.select_topk(items(s), s, 2, 0.7, hard=True), lambda s: khot.select_topk(items(s), s, 2, 0.7)),
}
# Where the other public functions are held to the transforms, or why they are not.
ELSEWHERE = {
    "soft_topk": "tests/test_transforms.py",
    "soft_topk_matrix": "tests/test_transforms.py",
    "sample_topk": "tests/test_design_transforms.py",
    "sample": "tests/test_design_transforms.py",
    "topk_mask": "no derivative",
    "certify_topk": "no derivative",
    "beam_search": "a search that calls the user's function",
    "reduce_tokens": "changes a model",
    "restore_tokens": "changes a model",
}
EVERY = pytest.mark.parametrize("name", TABLE)


def those(flag: str, value: bool = True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, row in TABLE.items() if getattr(row, flag) is value])


TRACED = pytest.mark.parametrize("name", [name if row.quick else pytest.param(name, marks=pytest.mark.slow) for name, row in TABLE.items()])


@EVERY
def test_gradcheck_in_all_variants(name: str) -> None:
    row = TABLE[name]
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True} if row.forward_mode else {}
    assert gradcheck(row.call, (spaced(2, 4).requires_grad_(),), check_batched_grad=True, check_grad_dtypes=True, **forward)


@those("double_backward")
def test_gradgradcheck(name: str) -> None:
    assert gradgradcheck(TABLE[name].call, (spaced(1, 4).requires_grad_(),))


@pytest.mark.parametrize("name", HARD)
def test_straight_through_in_every_mode(name: str) -> None:
    hard, soft = HARD[name]
    assert_derivative_in_every_mode(hard, spaced(5), torch.autograd.functional.jacobian(soft, spaced(5)))
    torch._dynamo.reset()
    compiled = torch.compile(hard, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (6, 9):
        x = spaced(2, size).requires_grad_()
        assert_close(compiled(x), hard(x))
        assert_close(torch.autograd.grad(compiled(x).square().sum(), x), torch.autograd.grad(hard(x).square().sum(), x))


@EVERY
def test_vmap_and_func(name: str) -> None:
    f, x = TABLE[name].call, spaced(3, 5)
    assert_close(torch.vmap(f)(x), f(x))
    reverse = torch.vmap(torch.func.jacrev(f))(x)
    assert_close(reverse[1], torch.autograd.functional.jacobian(f, x[1]))
    if TABLE[name].forward_mode:
        assert_close(torch.func.jacfwd(f)(x[1]), reverse[1])


@EVERY
def test_fake_tensors(name: str) -> None:
    shape = TABLE[name].call(torch.zeros(3, 6)).shape
    with FakeTensorMode() as mode:
        assert TABLE[name].call(mode.from_tensor(torch.zeros(3, 6))).shape == shape


@TRACED
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_with_dynamic_shapes(name: str, backend: str) -> None:
    torch._dynamo.reset()
    f = TABLE[name].call
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for size in (6, 9):
        x = spaced(3, size).requires_grad_()
        y = compiled(x)
        assert_close(y, f(x))
        assert_close(torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(f(x).square().sum(), x))


class _Module(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, scores: Tensor) -> Tensor:
        return TABLE[self.name].call(scores)


@dynamic_export
@TRACED
def test_exports_with_a_dynamic_length(name: str) -> None:
    n = torch.export.Dim("n", min=4, max=64)
    program = torch.export.export(_Module(name), (spaced(3, 6),), dynamic_shapes={"scores": {1: n}})
    for size in (6, 9):
        assert_close(program.module()(spaced(3, size)), TABLE[name].call(spaced(3, size)))


@dynamic_export
def test_what_does_not_export_says_so() -> None:
    class Network(torch.nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return khot.soft_topk(scores, 2, method="network")

    n = torch.export.Dim("n", min=4, max=64)
    with pytest.raises(Exception, match="network does not export with a dynamic length"):
        torch.export.export(Network(), (spaced(3, 6),), dynamic_shapes={"scores": {1: n}}, strict=False)


def test_every_public_function_is_in_a_table() -> None:
    rows = {f.__name__ for row in khot.RELAXATIONS.values() for f in (row.topk, row.matrix) if f is not None}
    listed = {name.split("(")[0].removeprefix("nn.") for name in (*TABLE, *HARD)} | set(ELSEWHERE)
    functions = {name for name in khot.__all__ if isinstance(getattr(khot, name), FunctionType)}
    assert functions - rows - listed == set()


def test_the_tables_name_every_registry() -> None:
    rooms = {
        "tests/test_transforms.py": "RELAXATIONS",
        "tests/test_design_transforms.py": "khot.DESIGNS",
        "tests/test_estimator_transforms.py": "ESTIMATORS",
        "tests/test_ksubset_transforms.py": "KSubset",
    }
    root = Path(__file__).parents[1]
    for room, table in rooms.items():
        assert table in (root / room).read_text()
