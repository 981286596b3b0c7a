"""The drawing of one call in the docs is what happens: the same functions, each question asked once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import khot
from khot import kernels

ROOT = Path(khot.__file__).parent
PAGE = (ROOT.parent.parent / "docs/path.md").read_text()
STEP = re.compile(r"([\w.<>]+) +\((?:khot/)?([\w/]+\.py)\)")


def calls(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Function and file of every call into khot's own files, in order."""
    found: list[tuple[str, str]] = []

    def look(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            found.append((code.co_qualname.split(".<locals>.")[-1] if sys.version_info >= (3, 11) else code.co_name,
                          str(Path(code.co_filename).relative_to(ROOT))))  # fmt: skip

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def drawn(title: str) -> set[tuple[str, str]]:
    """The steps of one drawing: everything written as ``function (file.py)`` under its title."""
    section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    block = re.findall(r"```text\n(.*?)```", section, re.DOTALL)[0]
    return {(name, file) for name, file in STEP.findall(block)}


def native_call() -> Callable[[], object]:
    scores = torch.randn(4, 64, requires_grad=True)
    khot.soft_topk(scores, 8).sum().backward()  # what is done once is done
    return lambda: khot.soft_topk(scores, 8)


@pytest.mark.skipif(not kernels.available(), reason="no compiled kernel here")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames tell their qualified names from Python 3.11 on")
def test_the_native_path_is_the_drawn_one() -> None:
    forward = calls(native_call())
    assert set(forward) == drawn("Forward, native")
    assert [name for name, _ in forward].count("ask") == 1
    assert [name for name, _ in forward].count("find_method") == 1
    assert len(forward) <= 8, "it was 23 once"
    y = khot.soft_topk(torch.randn(4, 64, requires_grad=True), 8)
    grad = torch.ones_like(y)
    assert set(calls(lambda: y.backward(grad))) == drawn("Backward, native")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames tell their qualified names from Python 3.11 on")
def test_the_reference_path_is_the_drawn_one() -> None:
    with kernels.disabled():
        forward = calls(native_call())
    asked = {"primitives/threshold/ordinary.py", "kernels/ordinary.py"}  # where there is a compiled kernel, whether the call is ordinary
    forward = [step for step in forward if step[1] not in asked]
    assert {file for _, file in forward} == {file for _, file in drawn("Forward, reference")}
    assert set(forward) >= drawn("Forward, reference")
    assert len(forward) <= 64, "it was 93 once"
