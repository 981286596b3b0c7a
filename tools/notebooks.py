"""Run notebooks in this process and write their outputs into them: ``python -m tools.notebooks notebooks/*.ipynb``.

A notebook is a list of cells; running one is running its code in order in one namespace. This needs no server and no kernel.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of its cells; an error in a cell is raised."""
    notebook = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    _figures()  # those that are open already are not the notebook's
    for number, cell in enumerate(cells, 1):
        cell["execution_count"], cell["outputs"] = number, _outputs(cell, number, names, f"{path.name}, cell {number}")
    return notebook


def _outputs(cell: Cell, number: int, names: dict[str, Any], where: str) -> list[Cell]:
    """What the cell prints, the value of its last line, and the figures that it leaves open."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = eval(compile(ast.Expression(last.value), where, "eval"), names) if isinstance(last, ast.Expr) else None
    out = [{"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())}] if printed.getvalue() else []
    if value is not None:
        out.append(_result(number, {"text/plain": _lines(repr(value))}))
    return out + [{"output_type": "display_data", "metadata": {}, "data": {"image/png": image}} for image in _figures()]


def _result(number: int, data: dict[str, Any]) -> Cell:
    return {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}


def _figures() -> list[str]:
    """The open figures as PNG, closed again."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    plt = sys.modules["matplotlib.pyplot"]
    images = []
    for number in plt.get_fignums():
        out = io.BytesIO()
        plt.figure(number).savefig(out, format="png", dpi=70, bbox_inches="tight")
        images.append(base64.b64encode(out.getvalue()).decode())
    plt.close("all")
    return images


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    for path in parser.parse_args(arguments).paths:
        path.write_text(json.dumps(run(path), indent=1, ensure_ascii=False) + "\n")
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
