"""Write the results in docs/benchmarks.md and docs/temperature.md from the data: tables and figures of every benchmark that has run."""

from __future__ import annotations

import argparse
import importlib
import statistics
from pathlib import Path
from typing import Any

from bench import targets, temperature
from bench.common import load
from bench.plot import DOCS, FIGURES

ABOUT = {
    "verbs": "The calls that models are trained with, each timed in turns with what it replaces. The matrix of `sequential` has the bound "
    "of `softrank` and `iterative`, 6 softmaxes of a (k, n) tensor. A sorting network mixes the rows of its matrix once a layer, forward "
    "and back: its bound is one softmax a layer, 105 at n = 10,000. It takes four times that, and memory for the record of its layers. "
    "Results of 32 MB and more lie in large pages, which `torch.softmax` does not ask for: most of the gain at (256, 32768) is that. The "
    "last calls, over an earlier commit, were timed with AVX-512 alone.",
    "reference": "What GPUs without Triton and CPUs without a compiler run, timed in turns with `torch.softmax` on the same tensor.",
    "small": "Small calls, where Python's share shows, in turns with an earlier commit, each in a process of its own. The hard mask, its "
    "gradient and the draw take a fraction of what they took. What Python spends between `soft_topk` and the kernel is less than half of "
    "what it was, forward and with its gradient: the second table. The whole call takes 0.57 of its earlier time on a few scores and 0.81 "
    "with its gradient, since PyTorch's own part, which softmax has too, stays.",
    "speed": "Forward and forward + backward, timed in turns with `torch.softmax` on the same tensor.",
    "choosing": "Every method, forward and forward + backward, on many short rows. The page on choosing a method reads these data.",
    "linear": "One row of n scores. Beyond the caches all that walk over memory slow down together.",
    "memory": "Peak of the resident memory, and what autograd keeps, as multiples of the input.",
    "quality": "How near the mask is to the hard top-k and how undecided it is, on normal scores.",
    "gradient": "The gradient beside that of the hard objective smoothed by noise, and a toy: which subset explains what is seen?",
    "seeds": "The experiment of the paper on successive halving: 85 pairs of n and k, d = 32, batches of 16 (256 items there). nCCS is "
    "the mean over the true rows of the best cosine among the selected ones. The best setting is the best of a sweep with a live gradient.",
    "sampling": "Random masks with exactly k ones: one draw of each design, timed in turns with torch's own sort and random numbers.",
    "estimators": "Each gradient estimator against the exact gradient of the expected objective, by enumerating all subsets.",
}
PICTURES = {
    "speed": ["speed", "speed_distributions", "speed_methods"],
    "linear": ["linear"],
    "memory": ["memory"],
    "quality": ["quality"],
    "gradient": ["gradient_agreement", "gradient_toy"],
    "seeds": ["seeds_time", "seeds_nccs", "seeds_methods"],
}
WHICH_TAU = DOCS.parent / "temperature.md"
BEGIN, END = "<!-- measured -->", "<!-- measured end -->"


def main(argv: list[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m bench page", description=__doc__)
    options.add_argument("--out", type=Path, default=DOCS.parent / "benchmarks.md")
    given = options.parse_args(argv)
    given.out.write_text(fill(given.out.read_text() if given.out.exists() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"))
    if given.out.parent == WHICH_TAU.parent and (rows := load("quality")):
        tables = "\n\n".join(table.markdown() for table in temperature.tables(rows))
        WHICH_TAU.write_text(between_marks(WHICH_TAU.read_text(), tables))
    return 0


def between_marks(text: str, body: str) -> str:
    """The text with everything between the two marks written anew."""
    if BEGIN not in text or END not in text:
        raise SystemExit(f"the page must have the lines {BEGIN} and {END}, between which the results go")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n{body}\n{text[text.index(END) :]}"


def fill(text: str) -> str:
    """The page of the benchmarks with its results written anew."""
    others = sorted(path.stem for path in FIGURES.glob("[a-z]*.py") if path.stem not in ABOUT)
    sections = [section(name, rows) for name in [*ABOUT, *others] if (rows := load(name))]
    body = "\n\n".join([*(table.markdown() for table in targets.tables()), *sections])
    return between_marks(text, body)


def section(name: str, rows: list[dict[str, Any]]) -> str:
    """One benchmark: what it is, where it ran, figures, tables."""
    tables = getattr(importlib.import_module(f"bench.{name}"), "tables", None)
    row, load_average = rows[-1], statistics.median(row.get("load", 0.0) for row in rows)
    where = f"{row['cpu']}, {row['cores']} cores, {row['isa']}; Python {row['python']}, torch {row['torch']}, {_commits(rows)}."
    pictures = [f"![{title}](figures/{title}.png)" for title in _pictures(name)]
    text = [f"## {name.capitalize()}", ABOUT.get(name, ""), f"Measured on {where} Load average: {load_average:.1f}.", *pictures]
    return "\n\n".join([part for part in text if part] + [table.markdown() for table in (tables(rows) if tables else [])])


def _pictures(name: str) -> list[str]:
    drawn = sorted(path.stem for path in DOCS.glob(f"{name}*.png"))
    return [title for title in PICTURES.get(name, drawn) if title in drawn]


def _commits(rows: list[dict[str, Any]]) -> str:
    """The commits behind the rows: data may have been completed or renewed in part by a later run."""
    found = dict.fromkeys(row["commit"] for row in rows)
    return ("commit " if len(found) == 1 else "in several runs at commits ") + ", ".join(f"`{commit}`" for commit in found)
