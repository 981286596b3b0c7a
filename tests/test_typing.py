"""Signatures are real: what ``help``, editors and type checkers show is what is called."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest

import khot

FUNCTIONS = [name for name in khot.__all__ if inspect.isfunction(getattr(khot, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_typed_documented_and_checked_in_strict_mode(name: str) -> None:
    function = getattr(khot, name)
    signature = inspect.signature(function)
    assert all(p.annotation is not p.empty and p.kind is not p.VAR_POSITIONAL for p in signature.parameters.values())
    assert typing.get_type_hints(inspect.unwrap(function)).get("return") is not None
    assert inspect.getdoc(function)
    assert f"khot.{name}(" in (Path(__file__).parent / "typing/public.py").read_text(), "tests/typing/public.py does not use it"


@pytest.mark.parametrize("row", khot.RELAXATIONS.values(), ids=str)
def test_a_method_shows_dim_and_its_own_options(row: khot.registry.Relaxation) -> None:  # type: ignore[name-defined]
    function = getattr(khot, f"{row.name}_{'topk' if row.kind == 'mask' else 'matrix'}")
    shown = inspect.signature(function).parameters
    assert list(shown)[:3] == ["scores", "k", "tau"]
    assert ("dim" in shown) == (row.kind == "mask")
    assert set(row.options) == set(shown) - {"scores", "k", "tau", "dim"}
