"""Weights times the soft mask over their magnitudes, in one step of autograd and in buffers that are used again.

A fresh megabyte costs more than the arithmetic on it: the system hands it out page by page. So the flat rows of scores, masks and
gradients live in a :class:`Room` from step to step, and only what leaves the step is new.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from khot import kernels
from khot._tensors import in_forward_mode, is_alone
from khot.kernels import masked as _registered  # noqa: F401  registers itself
from khot.nn.annealing import Method, spread
from khot.primitives.threshold.autograd import solve_mask
from khot.registry import find_method

WORTH = 1 << 15  # numbers from which on memory comes from the system page by page
LARGEST = 1e30  # beyond it sums of squares may leave the range


class Room:
    """Buffers that are handed out again once nobody else holds their memory; copies of a model start with an empty one."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any contents, that nobody else writes to."""
        size = math.prod(shape)
        if size < WORTH:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self.lock:
            flat = next((flat for flat in self.buffers if flat.numel() == size and flat.dtype == dtype and is_alone(flat)), None)
            if flat is None:
                flat = torch.empty(size, dtype=dtype, device="cpu")
                if is_alone(flat):  # else this torch cannot tell, and nothing is used twice
                    self.buffers.append(flat)
            # Not a view: one would count the changes of the whole buffer, and those of earlier steps.
            return flat.new_empty(0).set_(flat.untyped_storage(), 0, tuple(shape))  # pyright: ignore[reportCallIssue]  it takes them untyped

    def clear(self) -> None:
        self.buffers = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Room:
        return Room()

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        return Room, ()


def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of ``like``, one behind the other."""
    return [part.view(tensor.shape) for part, tensor in zip(flat.split([tensor.numel() for tensor in like]), like, strict=True)]


class _Masked(Function):
    r"""``w m(|w|)`` for each of the weights, with one mask ``m`` over all of them.

    With the gradients ``g`` of the products and the Jacobian ``J`` of the mask:
    :math:`g \odot m + \mathrm{sign}(w) \odot J^\top (g \odot w)`.
    """

    @staticmethod
    def forward(ctx: Any, solve: _Solver, mask: Tensor, k: float, scale: float, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.solve, ctx.mask, ctx.k, ctx.scale = solve, mask, k, scale
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        out = tuple(solve.like(weight) for weight in weights)
        solve.passes.products(weights, mask, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weights, solve, needed = ctx.saved_tensors, ctx.solve, ctx.needs_input_grad[4:]
        if is_grad_enabled():  # the gradient will be differentiated itself
            return None, None, None, None, *_again(solve.family, ctx.k, ctx.scale, weights, grads, needed)
        out = [solve.like(weight) if need else None for weight, need in zip(weights, needed, strict=True)]
        solve.passes.gradients(grads, weights, ctx.mask, ctx.scale, solve.family.kernel, out)
        return None, None, None, None, *out


def _again(
    family: Any, k: float, scale: float, weights: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> Iterator[Tensor | None]:
    """The same gradients by operations that can be differentiated."""
    flat = solve_mask(torch.cat([weight.abs().flatten() for weight in weights]), k, scale, family)
    parts = flat.split([weight.numel() for weight in weights])
    pairs = [(weight * part.view_as(weight), grad) for weight, part, grad in zip(weights, parts, grads, strict=True) if grad is not None]
    wanted = [weight for weight, need in zip(weights, needed, strict=True) if need]
    found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], create_graph=True))
    return (next(found) if need else None for need in needed)


class _Solver:
    """The native mask of a threshold family, with buffers of a room."""

    def __init__(self, room: Room, family: Any, native: Any, passes: Any) -> None:
        self.room, self.family, self.native, self.passes = room, family, native, passes

    def like(self, weight: Tensor) -> Tensor:
        return self.room.take(weight.shape, weight.dtype)

    def mask(self, weights: Sequence[Tensor], k: float, tau: float) -> tuple[Tensor, float]:
        """The mask over all magnitudes, and its temperature: ``tau`` in units of their spread."""
        size = [sum(weight.numel() for weight in weights)]
        scores, mask = (self.room.take(size, weights[0].dtype) for _ in range(2))
        total, squares = self.passes.magnitudes(weights, scores)
        scale = tau * _spread(total, squares, scores)
        self.native.forward(scores, k, scale, self.family.kernel, shift=False, curve=self.family.curve, out=mask)
        return mask, scale


def _spread(total: float, squares: float, scores: Tensor) -> float:
    """The deviation from sums that one pass has made; by :func:`spread` where their difference would lose digits, or is not finite."""
    n = scores.numel()
    variance = (squares - total / n * total) / n
    return math.sqrt(variance) if 0.1 * squares / n < variance < LARGEST else float(spread(scores))


def multiply(
    room: Room, method: Method, parts: Sequence[Sequence[Tensor]], ks: Sequence[int], tau: Tensor, *, keep: bool
) -> tuple[list[Tensor], list[Tensor]] | None:
    """The weights times their masks and, to ``keep``, the masks; ``None`` where the plain way has to be gone.

    Args:
        room: where buffers come from.
        method: as in :func:`khot.nn.sparsify`.
        parts: the weights, those that share a mask together.
        ks: how many weights each part may keep.
        tau: temperature in units of the magnitudes' spread.
        keep: whether the masks are wanted.
    """
    row = find_method(method) if isinstance(method, str) else None
    if row is None or row.family is None or in_forward_mode():
        return None
    family, weights = row.family(), [weight for part in parts for weight in part]
    passes = kernels.pick("masked", family.kernel, weights)
    if passes is None:
        return None
    solve = _Solver(room, family, kernels.pick("threshold", family.kernel, weights[0], 1.0, 1.0), passes)
    made, masks = list[Tensor](), list[Tensor]()
    for part, k in zip(parts, ks, strict=True):
        with torch.no_grad():
            mask, scale = solve.mask(part, float(k), float(tau))
        made.extend(_Masked.apply(solve, mask, float(k), scale, *part))  # pyright: ignore[reportArgumentType]
        masks.extend(split(mask, part) if keep else ())
    return made, masks
