"""The ``khot`` command."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import khot
from khot import kernels, tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run the subcommand, return the exit code."""
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="khot", description="Differentiable top-k for PyTorch.")
    parser.add_argument("--version", action="version", version=f"khot {khot.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    methods = commands.add_parser("methods", help="the table of relaxations", description="One line per relaxation in khot.RELAXATIONS.")
    methods.set_defaults(run=lambda options: _show(tables.methods()))
    designs = commands.add_parser("designs", help="the table of sampling designs", description="One line per design in khot.DESIGNS.")
    designs.set_defaults(run=lambda options: _show(tables.designs()))
    info = commands.add_parser("info", help="versions, threads and kernels in use; paste it into a bug report")
    info.set_defaults(run=_info)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="learn which k of 64 pixels to look at, and compare with four other ways to choose them",
        description="Learn by gradient which k of the 64 pixels of scikit-learn's digits to look at, jointly with a small classifier, and "
        "compare at the same k, network and budget with random pixels, the highest-variance pixels, mutual information, and the same "
        "training without relaxation. Prints a table of test accuracies and saves a picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--out", type=Path, default=Path("khot-demo.png"), metavar="PNG", help="where the picture goes")
    demo.add_argument("--k", type=int, nargs="+", default=[2, 4, 8, 12, 16, 24], metavar="K", help="how many pixels")
    demo.add_argument("--seeds", type=int, default=6, metavar="N", help="repetitions; each has its own split, weights and batches")
    demo.add_argument("--steps", type=int, default=1000, metavar="N", help="optimiser steps of every method")
    soft = sorted(name for name, row in khot.RELAXATIONS.items() if row.grad_k)  # these take a k per row
    demo.add_argument("--method", default="sigmoid", choices=soft, help="the relaxation to learn with")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    missing = [name for name in ("sklearn", "matplotlib", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"khot demo needs {', '.join(missing)}; install with: pip install 'khot[demo]'\n")
        return 2
    from khot.demo import run

    return run(ks=options.k, seeds=options.seeds, steps=options.steps, method=options.method, out=options.out)


def _info(options: argparse.Namespace) -> int:
    facts = {
        "khot": khot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "accelerator": _accelerator(),
        "kernels": ", ".join(kernels.available()) or "none: plain PyTorch",
        "relaxations": str(len(khot.RELAXATIONS)),
        "designs": str(len(khot.DESIGNS)),
    }
    _show([[name, value] for name, value in facts.items()])
    return 0


def _accelerator() -> str:
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "none"


def _show(rows: tables.Rows) -> int:
    """Print rows in columns; the last column runs on."""
    rows = [[cell.replace("`", "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
