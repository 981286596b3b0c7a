"""No mask of n scores makes a tensor that grows as n x n, forward or backward, native or not: comparisons go in pieces of a fixed size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import khot
from khot import kernels

N, K = 8192, 3
PIECE = 1 << 22  # numbers in the largest piece that any method works on, however long the row
MASKS = [name for name, row in khot.RELAXATIONS.items() if row.topk is not None]


class Largest(TorchDispatchMode):
    """The largest number of entries that any call has in its results, by memory: an expanded tensor has none of its own."""

    found, where = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() // tensor.element_size() > self.found:
                self.found, self.where = tensor.untyped_storage().nbytes() // tensor.element_size(), str(func)
        return out


@pytest.mark.parametrize("method", MASKS)
def test_pieces_do_not_grow_with_the_row(method: str) -> None:
    scores = torch.randn(1, N, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with kernels.disabled(), Largest() as seen:
        khot.soft_topk(scores, K, method=method).square().sum().backward()
    assert seen.found <= PIECE + N, f"{seen.where} makes {seen.found} numbers of {N} scores"


def test_the_watch_sees_a_square() -> None:
    scores = torch.randn(N)
    with Largest() as seen:
        (scores.unsqueeze(0) - scores.unsqueeze(1)).sum()
    assert seen.found == N * N


@pytest.mark.parametrize("method", MASKS)
def test_the_usual_path_is_linear_in_memory(method: str) -> None:
    """The native or in-place path sees no dispatch mode: here the allocator is asked."""
    scores = torch.randn(1, N, generator=torch.Generator().manual_seed(0)).requires_grad_()
    khot.soft_topk(scores, K, method=method).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        khot.soft_topk(scores, K, method=method).square().sum().backward()
    largest = max((event.self_cpu_memory_usage for event in seen.events()), default=0)
    # A piece of float32 with its indices, as torch.topk returns them: less than a byte for each pair of scores.
    assert largest <= 12 * (PIECE + N) < N * N, f"{largest} bytes in one call"
