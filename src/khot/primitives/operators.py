"""How a primitive that no compiler should look into becomes an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("khot", "FRAGMENT")  # the operators go when it goes


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, random: bool = False) -> str:
    """Register ``run`` under the name in ``schema``, with ``fake`` for shapes and dtypes; returns the full name.

    Args:
        schema: ``name(Tensor x, SymInt n) -> Tensor``.
        random: the operator draws random numbers, so that two calls with equal arguments are not the same.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if random else ())
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"khot::{name}", fake, lib=_LIBRARY)
    return f"khot::{name}"


def derive(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Give the operator ``name`` a derivative."""
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_LIBRARY)
