"""Docstrings are reStructuredText, which ``help()`` shows well; the site is Markdown, its formulas MathML, so that it needs no script."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math::[ ]*(.*?)(?=\n\s*\n(?!\1 )|\n\1\S|\Z)", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`", re.DOTALL)
ROLE = re.compile(r":(?:func|class|data|mod|meth):`~?([^`]+)`")
LITERAL = re.compile(r"``([^`]+)``")


def markdown(text: str) -> str:
    """``text`` with formulas, roles and literals as Markdown knows them."""
    text = BLOCK.sub(lambda m: f"{m[1]}{_math(m[2], 'block')}\n", text)
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)  # the name under which prompts become code
    text = INLINE.sub(lambda m: _math(m[1], "inline"), text)
    return LITERAL.sub(r"`\1`", ROLE.sub(r"`\1`", text))


def _math(formula: str, display: str) -> str:
    tex = " ".join(textwrap.dedent(formula).split()).replace(r"\arg", r"\operatorname{arg}\,")
    # Markdown takes <math> at the start of a line for a paragraph of its own.
    return f"<span>{convert(tex, display=display)}</span>".replace("\n", "")


class RstToMarkdown(griffe.Extension):
    """Rewrite every docstring as it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
