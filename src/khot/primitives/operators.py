"""How a primitive that no compiler should look into becomes an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._tensors import autograd_kernel, batching_kernel, register_fake

_LIBRARY = torch.library.Library("khot", "FRAGMENT")  # the operators go when it goes


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, random: bool = False, batched: Callable[..., Any] | None = None
) -> str:
    """Register ``run`` under the name in ``schema``, with ``fake`` for shapes and dtypes; returns the full name.

    Args:
        schema: ``name(Tensor x, SymInt n) -> Tensor``.
        random: the operator draws random numbers, so that two calls with equal arguments are not the same.
        batched: what ``vmap`` does with it, as ``torch.library.register_vmap`` takes it.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if random else ())
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_fake(_LIBRARY, f"khot::{name}", fake)
    if batched is not None:
        _batches(f"khot::{name}", batched)
    return f"khot::{name}"


def _batches(name: str, batched: Callable[..., Any]) -> None:
    kernel = batching_kernel(name, batched)
    if kernel is None:
        torch.library.register_vmap(name, batched, lib=_LIBRARY)
    else:
        _LIBRARY.impl(name.split("::")[1], kernel, "FuncTorchBatched", with_keyset=True)


def derive(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Give the operator ``name`` a derivative. torch writes a class for it, which takes longer than all the rest: on its first call."""
    kernel = autograd_kernel(name, backward, setup_context)
    if kernel is None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_LIBRARY)
    else:
        _LIBRARY.impl(name.split("::")[1], kernel, "Autograd", with_keyset=True)


def define_rows(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """:func:`define`, with a batching rule, an operator whose tensors are all ``(..., n)`` rows or ``(..., 1)`` columns beside them."""
    name = schema.split("(")[0]

    def batched(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        rows = [leading(value, dim, info.batch_size) for value, dim in zip(inputs, in_dims, strict=True)]
        out = getattr(torch.ops.khot, name)(*rows)
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    return define(schema, run, fake, batched=batched)


def leading(value: Any, dim: int | None, size: int) -> Any:
    """The batch as the first dimension of a tensor."""
    if not isinstance(value, Tensor):
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
