"""The short way of the ordinary call: which calls take it, and that it gives what the general way gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot import kernels
from khot.kernels import ordinary

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native library")
FAMILIES = ("sigmoid", "euclidean", "laplace", "gaussian")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((8,), (1, 8), (3, 5, 40), (2, 1500), (4, 0), (0, 4))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each call that was asked for: whether it was ordinary."""
    seen: list[bool] = []
    ask = ordinary.ask

    def listen(*arguments: Any) -> bytes | None:
        found = ask(*arguments)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(ordinary, "ask", listen)
    return seen


def gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
    return out.detach(), torch.autograd.grad(out, leaf, weights)[0]


@pytest.mark.parametrize("method", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("hard", [False, True])
def test_the_same_as_the_general_way(taken: list[bool], method: str, dtype: torch.dtype, shape: tuple[int, ...], hard: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    k = min(3, shape[-1])
    short = gradient(lambda s: khot.soft_topk(s, k, 0.5, method=method, hard=hard), x)
    assert taken == [True]
    # With the last dimension named otherwise, the call goes through the door.
    long = gradient(lambda s: khot.soft_topk(s, k, 0.5, method=method, hard=hard, dim=s.ndim - 1), x)
    assert not any(taken[1:])
    for one, other in zip(short, long, strict=True):
        assert one.dtype is dtype
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(khot.soft_topk(x, k, 0.5, method=method, hard=hard), short[0])


@pytest.mark.parametrize("method", FAMILIES)
@pytest.mark.parametrize("hard", [False, True])
def test_second_derivatives(taken: list[bool], method: str, hard: bool) -> None:
    """Those of the soft mask, also behind the hard one."""
    x = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def hessian(**options: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        first = torch.autograd.grad((khot.soft_topk(leaf, 2, method=method, **options) * x.sin()).sum(), leaf, create_graph=True)[0]
        return torch.autograd.grad((first * x.cos()).sum(), leaf)[0] if first.requires_grad else torch.zeros_like(x)

    found = hessian(hard=hard)
    assert taken and all(taken)
    with kernels.disabled():
        torch.testing.assert_close(found, hessian(), rtol=1e-8, atol=1e-10)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Own(Tensor):
    pass


NOT_ORDINARY = {
    "k is a tensor": lambda x: khot.soft_topk(x, torch.tensor([2, 3])),
    "tau is a tensor": lambda x: khot.soft_topk(x, 2, torch.tensor(1.0)),
    "tau is tiny": lambda x: khot.soft_topk(x, 2, 1e-40),
    "a subclass": lambda x: khot.soft_topk(x.as_subclass(_Own), 2),
    "vmap": torch.vmap(lambda x: khot.soft_topk(x, 2)),
    "disabled": lambda x: _under(kernels.disabled(), x),
    "a mode": lambda x: _under(_Mode(), x),
    "hard with a fraction": lambda x: khot.topk_mask(x, 2.0),
    "forward mode": lambda x: torch.func.jvp(lambda s: khot.soft_topk(s, 2), (x,), (x,))[0],
}


def _under(context: Any, x: Tensor) -> Tensor:
    with context:
        return khot.soft_topk(x, 2)


@pytest.mark.parametrize("name", NOT_ORDINARY)
def test_leaves_the_short_way(taken: list[bool], name: str) -> None:
    NOT_ORDINARY[name](torch.randn(2, 6))
    assert not any(taken)


@pytest.mark.parametrize(
    ("scores", "k", "tau", "error"),
    [
        (torch.zeros(3), True, 1.0, TypeError),
        (torch.zeros(3), 4, 1.0, ValueError),
        (torch.zeros(3), -1, 1.0, ValueError),
        (torch.zeros(3), float("nan"), 1.0, ValueError),
        (torch.zeros(3), 1, 0.0, ValueError),
        (torch.zeros(3), 1, float("nan"), ValueError),
        (torch.zeros(()), 0, 1.0, ValueError),
        (torch.zeros(3, dtype=torch.long), 1, 1.0, TypeError),
        ([1.0, 2.0], 1, 1.0, TypeError),
        (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]), 1, 1.0, TypeError),
        (torch.zeros(3).to_sparse(), 1, 1.0, TypeError),
    ],
    ids=str,
)
def test_wrong_arguments_have_their_message(scores: Any, k: Any, tau: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        khot.soft_topk(scores, k, tau)


def test_takes_parameters_and_strided_memory(taken: list[bool]) -> None:
    x = torch.randn(6, 4)
    assert torch.equal(khot.soft_topk(torch.nn.Parameter(x), 2).detach(), khot.soft_topk(x, 2))
    assert torch.equal(khot.soft_topk(x.T, 2), khot.soft_topk(x.T.contiguous(), 2))
    assert torch.equal(khot.topk_mask(x.T, 2), khot.topk_mask(x.T.contiguous(), 2))
    assert taken == [True] * 6


def test_a_mask_changed_in_place_is_refused() -> None:
    leaf = torch.randn(2, 6, requires_grad=True)
    mask = khot.soft_topk(leaf, 2)
    with torch.no_grad():
        mask.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mask.sum().backward()
