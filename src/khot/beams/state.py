"""What a step carries from one token to the next: any nesting of tensors whose first two dimensions are batch and beam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same nesting of tuples, lists and dicts with every tensor replaced; anything else stays as it is."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return type(state)((key, map_state(function, value)) for key, value in state.items())
    if isinstance(state, tuple) and hasattr(state, "_fields"):  # a NamedTuple
        return type(state)(*(map_state(function, value) for value in state))
    if isinstance(state, (tuple, list)):
        return type(state)(map_state(function, value) for value in state)
    return state


def spread(state: Any, beams: int, rows: int) -> Any:
    """``(B, ...)`` tensors beside every beam, ``(B, K, ...)``."""

    def one(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise ValueError(f"every tensor of state must have the batch of {rows} as its first dimension, got shape {tuple(tensor.shape)}")
        return tensor.unsqueeze(1).expand(rows, beams, *tensor.shape[1:])

    return state if hasattr(state, "reorder") else map_state(one, state)


def reorder(state: Any, index: Tensor) -> Any:
    """The state of the beams ``index`` ``(B, K)``; an object with a method ``reorder(index)`` does it itself."""
    if hasattr(state, "reorder"):
        return state.reorder(index)
    return map_state(lambda tensor: take(tensor, index), state)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Beams ``index`` ``(B, J)`` of ``(B, K, ...)``."""
    shape = (*index.shape, *tensor.shape[2:])
    return tensor.gather(1, index.reshape(*index.shape, *[1] * (tensor.ndim - 2)).expand(shape))


def mix(state: Any, weights: Tensor) -> Any:
    """States mixed by ``weights`` ``(B, K, K)``: row ``i`` says what the new beam ``i`` is made of. Integers and bools cannot be mixed."""

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise TypeError(
                f"a relaxed beam mixes the states of beams, so they must be floating, got {tensor.dtype}; keep counters outside"
            )
        flat = tensor.reshape(*tensor.shape[:2], -1)
        return (weights.to(flat.dtype) @ flat).reshape(tensor.shape)

    if hasattr(state, "reorder"):
        raise TypeError("a relaxed beam mixes the states of beams; give a state made of tensors instead of an object with reorder()")
    return map_state(one, state)
