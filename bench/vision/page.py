"""Write the tables of docs/vision.md anew from the records in bench/results/vision, each between its two marks."""

from __future__ import annotations

import argparse
import functools
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.common import RESULTS, Table
from bench.vision import minilm, overhead, throughput
from khot.train import records, results

PAGE = Path(__file__).parents[2] / "docs" / "vision.md"
MARKS = re.compile(r"<!-- measured (\w+) -->\n.*?<!-- measured end -->", re.DOTALL)
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m bench vision page", description=__doc__)
    options.add_argument("--records", type=Path, default=RESULTS / "vision")
    options.add_argument("--out", type=Path, default=PAGE)
    given = options.parse_args(argv)
    given.out.write_text(MARKS.sub(functools.partial(section, folder=given.records), given.out.read_text()))
    return 0


def section(found: re.Match[str], folder: Path) -> str:
    """The tables of one part, with its marks, so that they can be written again."""
    name = found[1]
    files, tables = PARTS[name]
    rows = records.read(path for path in (folder / f"{file}.jsonl" for file in files) if path.exists())
    body = "\n\n".join([*(table.markdown() for table in tables(rows)), *where(rows)]) if rows or name == "runs" else "Not run yet."
    return f"<!-- measured {name} -->\n{body}\n<!-- measured end -->"


def where(rows: list[Row]) -> list[str]:
    """On what all of it was measured."""
    if not rows:
        return []
    commits = dict.fromkeys(str(row.get("commit")) for row in rows)
    versions = f"Python {rows[-1]['python']}, torch {rows[-1]['torch']}"
    processor = next((f"{row['cpu']}, " for row in rows if "cpu" in row), "")
    loads = [row["load"] for row in rows if {"load", "seconds"} <= row.keys()]  # of what was timed
    rough = f" Load average {min(loads):.0f} to {max(loads):.0f}, of the minute before each record." if loads and max(loads) > 2.5 else ""
    return [f"{len(rows)} records; {processor}one thread; {versions}; at {', '.join(f'`{commit}`' for commit in commits)}.{rough}"]


def runs(rows: list[Row]) -> list[Table]:
    whole = [row for row in rows if not (row["config"].get("reduce") or row["config"].get("weights"))]
    head, *body = results.table(whole)
    return [Table("Every planned row", head, body), *pairs(whole)]


def relaxations(rows: list[Row]) -> list[Table]:
    """One network and one budget, another selection matrix in each row; dearest last."""
    lines = []
    for method in dict.fromkeys(row["config"]["model_options"]["method"] for row in rows):
        some = [row for row in rows if row["config"]["model_options"]["method"] == method]
        shares = [statistics.mean(column) for column in zip(*(row["off_diagonal"] for row in some), strict=True)]
        minutes = statistics.mean(row["cpu_minutes"] for row in some)
        lines.append(
            [method, mean([row["top1"] for row in some], 2), len(some), f"{minutes:.1f}", " ".join(f"{share:.2f}" for share in shares)]
        )
    first = rows[0]
    title = f"{results.TITLES[first['model']]}, {results.DATA[first['data']]}, {first['config']['epochs']} epochs"
    head = ["method", "top-1, %", "seeds", "CPU-min", "off-diagonal share by block"]
    return [Table(title, head, sorted(lines, key=lambda line: float(line[3])))]


RIVALS = (("topk_dynamic", "vit"), ("topk_attention", "topk_attention_none"), ("topk_attention_attend", "topk_attention"), ("mixer", "vit"))


def pairs(rows: list[Row]) -> list[Table]:
    """Who is ahead of whom on the same test images, seed by seed; both were trained for as long."""
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        for one, other in RIVALS:
            found = {model: {_run(row): row for row in rows if (row["data"], row["model"]) == (data, model)} for model in (one, other)}
            for seed, epochs in sorted(found[one].keys() & found[other].keys()):
                points, low, high = results.compare(found[one][seed, epochs], found[other][seed, epochs])
                names = [results.TITLES[model] for model in (one, other)]
                lines.append([results.DATA.get(data, data), *names, seed, f"{points:+.2f}", f"{low:+.2f} to {high:+.2f}"])
    return (
        [Table("Paired differences in top-1, points", ["Dataset", "Model", "ahead of", "Seed", "by", "95 % interval"], lines)]
        if lines
        else []
    )


def _run(row: Row) -> tuple[int, int]:
    return row["seed"], row["config"]["epochs"]


def canvas(rows: list[Row]) -> list[Table]:
    lines = []
    for method, steps in dict.fromkeys((row["method"], row["steps"]) for row in rows):
        some = [row for row in rows if (row["method"], row["steps"]) == (method, steps)]
        reached = [str(row["steps_to_90"] or "not reached") for row in some]
        minutes = statistics.mean(row["cpu_minutes"] for row in some)
        lines.append([method, steps, mean([row["top1"] for row in some]), len(some), ", ".join(reached), f"{minutes:.1f}"])
    title = f"{rows[0]['k']} of 49 patches, steps of {rows[0]['batch']} canvases, {rows[0]['test']} test canvases"
    return [Table(title, ["selection", "steps", "top-1, %", "seeds", "steps to 90 %, by seed", "CPU-min"], lines)]


def mean(values: list[float], digits: int = 1) -> str:
    return f"{statistics.mean(values):.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def reduction(rows: list[Row]) -> list[Table]:
    """Top-1 lost against the whole model, on the same images."""
    whole = next(row for row in rows if row["choice"] == "all tokens")
    rates = sorted({row["keep"] for row in rows if row["keep"] < 1}, reverse=True)
    lines = [["all tokens", "", f"{whole['top1']:.2f}", *[""] * (len(rates) - 1)]]
    for choice, tuned in dict.fromkeys((row["choice"], row["tuned"]) for row in rows if row is not whole):
        cells = {row["keep"]: row for row in rows if (row["choice"], row["tuned"]) == (choice, tuned)}
        lines.append([choice, "2 epochs" if tuned else "none", *(_lost(whole, cells.get(rate)) for rate in rates)])
    head = ["score", "fine-tuning", *(f"keep {rate:g}" for rate in rates)]
    return [Table(f"{results.DATA[whole['data']]}, points of top-1 lost, {whole['images']} test images", head, lines)]


def _lost(whole: Row, row: Row | None) -> str:
    if row is None:
        return "not run"
    points, low, high = results.compare(whole, row)
    return f"{points:.2f} ± {(high - low) / 2:.2f}"


PARTS: dict[str, tuple[tuple[str, ...], Callable[[list[Row]], Iterable[Table]]]] = {
    "runs": (("fashion_mnist", "cifar10"), runs),
    "relaxations": (("relaxations",), relaxations),
    "throughput": (("throughput",), throughput.tables),
    "overhead": (("overhead",), overhead.tables),
    "minilm": (("minilm",), minilm.tables),
    "canvas": (("canvas",), canvas),
    "reduction": (("reduction",), reduction),
}
