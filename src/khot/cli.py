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
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:  # its flags are those of the configuration, read by jsonargparse
        return _train(given[1:])
    parser = _parser()
    if not given:
        parser.exit(2, parser.format_help())
    options = parser.parse_args(given)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="khot", description="Differentiable top-k for PyTorch.")
    parser.add_argument("--version", action="version", version=f"khot {khot.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_training(commands)
    _add_explore(commands)
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
    if not _has(("sklearn", "matplotlib", "rich"), "khot demo", "demo"):
        return 2
    from khot.demo import run

    return run(ks=options.k, seeds=options.seeds, steps=options.steps, method=options.method, out=options.out)


def _add_training(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    commands.add_parser("train", help="train an image model, or resume it; khot train --help shows every setting")
    test = commands.add_parser("eval", help="test trained weights", description="Top-1 and top-5 of a model on its test images.")
    test.add_argument("weights", type=Path, help="model.safetensors of a run")
    test.add_argument("--data_dir", type=Path, help="where the data are, if not where they were in training")
    test.set_defaults(run=_eval)
    results = commands.add_parser("results", help="the table of results", description="One row per model and data set, from run records.")
    results.add_argument("records", type=Path, nargs="*", default=[Path("bench/results/vision")], help="files or folders of records")
    results.set_defaults(run=_results)


def _train(arguments: list[str]) -> int:
    if not _has(("ignite", "jsonargparse", "safetensors", "rich"), "khot train", "train"):
        return 2
    from khot.train.config import parse
    from khot.train.engine import train

    try:
        record = train(parse(arguments))
    except (ValueError, OSError, FloatingPointError) as error:
        sys.stderr.write(f"khot train: {error}\n")
        return 1
    names = ("model", "data", "seed", "top1", "top5", "validation", "cpu_minutes")
    return _show([[name, f"{record[name]:.2f}" if isinstance(record[name], float) else str(record[name])] for name in names])


def _eval(options: argparse.Namespace) -> int:
    if not _has(("ignite", "safetensors"), "khot eval", "train"):
        return 2
    from khot.train.evaluate import score_lines

    try:
        return _show([list(line) for line in score_lines(options.weights, options.data_dir)])
    except (ValueError, OSError) as error:
        sys.stderr.write(f"khot eval: {error}\n")
        return 1


def _results(options: argparse.Namespace) -> int:
    from khot.train import records, results

    missing = [str(path) for path in options.records if not path.exists()]
    if missing:
        sys.stderr.write(f"khot results: no such file: {', '.join(missing)}; a run writes its record to records.jsonl in its --out\n")
        return 1
    try:
        sys.stdout.write(tables.markdown(results.table(records.read(options.records))))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"khot results: {error}\n")
        return 1
    return 0


def _add_explore(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explore = commands.add_parser(
        "explore",
        help="a local page to drag scores, k and tau and compare methods and designs",
        description="Serve a page on this machine's own address (127.0.0.1) that shows what every method and design makes of scores, k "
        "and tau: mask, Jacobian, matrix, sampled frequencies, and the code of the same call.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    explore.add_argument("--port", type=int, default=8642, help="0 takes any that is free")
    explore.add_argument("--open", action="store_true", help="open it in the browser")
    explore.set_defaults(run=_explore)


def _explore(options: argparse.Namespace) -> int:
    if not _has(("starlette", "uvicorn"), "khot explore", "explore"):
        return 2
    from khot.explore import server

    try:
        listener = server.bind(options.port)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"khot explore: {error}\n")
        return 1
    torch.set_num_threads(1)  # of 64 items at most: several threads would wait for each other longer than they work
    print(f"khot explore: {server.address(listener)} (stop with Ctrl+C)", flush=True)
    server.serve(listener, browser=options.open)
    return 0


def _has(modules: Sequence[str], command: str, extra: str) -> bool:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"{command} needs {', '.join(missing)}; install with: pip install 'khot[{extra}]'\n")
    return not missing


def _info(options: argparse.Namespace) -> int:
    facts = {
        "khot": khot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "accelerator": _accelerator(),
        "kernels": ", ".join(kernels.available()) or f"none: plain PyTorch ({kernels.why_none()})",
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
