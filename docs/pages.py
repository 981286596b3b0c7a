"""A page for every relaxation and every design, written from its row of the registry and its docstring."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import khot
from bench.choosing import SHAPE
from bench.common import load
from bench.figures._choice import choices as measured_choices
from bench.figures._choice import cost
from khot.tables import markdown

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
LAWS = {
    "sums_to_k": "the mask sums to k",
    "smooth": "continuously differentiable in the scores",
    "sparse": "exact zeros at finite scores",
    "grad_k": "gradient in k, so that k may be a fraction and differ between rows",
    "grad_tau": "gradient in the temperature",
    "bounded": "entries in [0, 1]",
    "monotone": "a larger score never weighs less",
    "shift_invariant": "adding a constant to all scores changes nothing",
    "hard_limit": "a small tau gives the hard top-k",
    "flat_limit": "a large tau gives k/n everywhere",
    "scale_free": "depends on scores / tau alone: huge scores give the hard top-k",
    "ties_equal": "equal scores weigh the same",
    "complete": "k = n selects everything",
    "excludes": "a score of -inf has weight exactly 0",
    "infinite": "a score of +inf has weight exactly 1",
    "deterministic": "two calls give the same",
    "double_backward": "second derivatives",
    "forward_mode": "forward-mode derivatives (jvp, jacfwd)",
    "compiles": "torch.compile takes it as one graph",
    "exports": "torch.export takes it with a dynamic length",
}
PROMISES = {
    "exact": "the inclusion probabilities are the given ones",
    "fixed_size": "every sample has exactly k items",
    "log_prob": "the probability of a sample is offered",
    "positive_joint": "every two items can come together",
    "vmaps": "draws inside torch.func.vmap",
    "compiles": "torch.compile takes it as one graph",
}


def every() -> Iterator[tuple[str, str]]:
    """Path and Markdown of every page."""
    for name, row in sorted(khot.RELAXATIONS.items()):
        yield f"methods/{name}.md", method(row)
    for name, row in sorted(khot.DESIGNS.items()):
        yield f"designs/{name}.md", design(row)


def notebooks() -> Iterator[tuple[str, str]]:
    """Path and Markdown of the notebooks, as they were last run."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        where = f"*This page is `notebooks/{path.name}` of the repository.*"
        yield f"notebooks/{path.stem}.md", "\n\n".join([*(part for cell in cells for part in _cell(cell)), where])


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
    for output in cell.get("outputs", []):
        image = output.get("data", {}).get("image/png")
        said = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
        yield f'<img alt="what the cell draws" src="data:image/png;base64,{image}">' if image else f"```text\n{said.rstrip()}\n```"


def method(row: Any) -> str:
    returns = "a mask, and a matrix with a row per place" if row.matrix is not None else "a mask"
    facts = [["property", "value"], ["returns", returns], ["cost", row.cost], ["measured", _measured(row.name)], ["paper", row.paper]]
    facts += [["options", ", ".join(f"`{name}={value!r}`" for name, value in row.options.items())]] if row.options else []
    alt = f"Value and gradient of {row.name} for two items"
    return _page(row.name, alt, "method", _method_code(row), facts, _laws(row, LAWS), function_of(row.name))


def function_of(name: str) -> Any:
    """The public function of a relaxation."""
    return getattr(khot, f"{name}_topk", None) or getattr(khot, f"{name}_matrix")


def design(row: Any) -> str:
    facts = [["property", "value"], ["cost", row.cost], ["paper", row.paper], *([["note", row.note]] if row.note else [])]
    facts += [["options", ", ".join(f"`{name}={value!r}`" for name, value in row.options.items())]] if row.options else []
    alt = f"Inclusion frequencies of {row.name} beside the probabilities, and pairs"
    return _page(row.name, alt, "design", _design_code(row), facts, _laws(row, PROMISES), row.draw)


def _page(name: str, alt: str, kind: str, code: str, facts: list[list[str]], laws: list[list[str]], function: Any) -> str:
    said = printed(code)
    return "\n\n".join(
        [
            f"# `{name}`",
            f"![{alt}](../figures/made/{kind}_{name}.svg)",
            f"```python\n{code}```" + (f"\n\n```text\n{said}```" if said else ""),
            markdown(facts),
            "## Definition",
            f"::: {function.__module__}.{function.__name__}",
            "## Laws",
            markdown([["law", "kept", "meaning"], *laws]),
        ]
    )


def _method_code(row: Any) -> str:
    call = f'khot.soft_topk(scores, k=2, tau=0.5, method="{row.name}")'
    lines = ["import torch, khot", "", "scores = torch.tensor([1.0, 4.0, 2.0, 3.0])", f"mask = {call}", "print(mask)"]
    if not row.deterministic:
        lines[-1] = "print(mask.sum().item())"
    elif row.matrix is not None:
        lines.append(f'print(khot.soft_topk_matrix(scores, k=2, tau=0.5, method="{row.name}"))')
    return "\n".join(lines) + "\n"


def _design_code(row: Any) -> str:
    lines = ["import torch, khot", "", "probs = torch.tensor([0.9, 0.7, 0.5, 0.4, 0.3, 0.2])  # sums to 3"]
    lines.append(f'samples = khot.sample(probs, design="{row.name}", num_samples=1000)  # (1000, 6) of 0 and 1')
    lines.append("print(samples.sum(-1).unique())" if row.fixed_size else "print(samples.shape)")
    return "\n".join(lines) + "\n"


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue()


def _measured(name: str) -> str:
    found = cost(name, load("choosing"))
    return "not timed" if found is None else f"{_short(found)} softmaxes forward + backward on {SHAPE} scores, one thread"


def _short(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _laws(row: Any, words: dict[str, str]) -> list[list[str]]:
    return [[name.replace("_", " "), "✓" if getattr(row, name) else "·", said] for name, said in words.items()]


def choices() -> str:
    """Every method at its best temperature: cost, gradient, closeness."""
    head = ["method", "softmaxes", "best cosine", "at tau", "solved", "distance to hard"]
    body = [
        [
            f"[`{c.name}`](methods/{c.name}.md)",
            _short(c.cost),
            f"{c.cosine:.2f}",
            f"{c.tau:g}",
            f"{c.solved:.0%}",
            f"{c.gap:.2f}",
        ]
        for c in sorted(measured_choices(), key=lambda c: -c.cosine)
    ]
    return markdown([head, *body])


def links(kind: str) -> str:
    """A list of the pages of one kind, with the first sentence of each docstring."""
    rows = khot.RELAXATIONS if kind == "methods" else khot.DESIGNS
    return "\n".join(f"- [`{name}`]({kind}/{name}.md): {_first(rows[name], kind)}" for name in sorted(rows))


def _first(row: Any, kind: str) -> str:
    function = row.draw if kind == "designs" else function_of(row.name)
    return (function.__doc__ or "").strip().split("\n", 1)[0].replace("``", "`")
