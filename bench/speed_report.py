"""The table at the end of a speed run."""

from __future__ import annotations

from typing import Any

from bench.common import NATIVE, Table, same
from bench.speed_cells import MODES, SHAPES

KINDS = ("baseline", "method", "peer")
KEYS = ("dtype", "threads", "dist", "count")


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Ratio to softmax, forward / forward + backward: every method on plain scores, sigmoid top-k on all of them."""
    skipped = sum("skipped" in row for row in rows)
    note = f"{len(rows)} rows, {skipped} of them say why something was not timed. Every ratio is against softmax in the same run."
    return [_plain(rows, note), *_hard(rows)]


def _plain(rows: list[dict[str, Any]], note: str) -> Table:
    plain = [row for row in rows if same(row, count="n/16", dist="normal", dtype="float32", threads=1) and row["kind"] in KINDS]
    names = dict.fromkeys((row["kind"], row["what"], row["kernels"]) for row in plain)
    native = any(kernels == "on" for _, _, kernels in names)
    shown = [name for name in names if name[0] == "method" or name[2] == "on" or not native]
    lines = [_line(plain, what, kernels) for _, what, kernels in sorted(shown, key=lambda name: KINDS.index(name[0]))]
    return Table(
        "ratio to torch.softmax, forward / forward + backward; k = n/16, normal scores, float32, 1 thread", ["", *SHAPES], lines, note
    )


def _line(rows: list[dict[str, Any]], what: str, kernels: str) -> list[str]:
    mine = [row for row in rows if same(row, what=what, kernels=kernels)]
    path = f" ({'native' if kernels == 'on' else 'reference'})" if what in NATIVE else ""
    return [f"{what}{path}", *(_ratio(mine, shape) for shape in SHAPES)]


def _hard(rows: list[dict[str, Any]]) -> list[Table]:
    """Sigmoid top-k over counts, distributions, dtypes and threads, on the best path there is."""
    path = "on" if any(same(row, kernels="on") for row in rows) else "off"
    mine = [row for row in rows if same(row, what="sigmoid", kernels=path)]
    kinds = dict.fromkeys(tuple(row[key] for key in KEYS) for row in mine if "ratio" in row)
    lines = []
    for kind in sorted(kinds, key=lambda kind: (kind[0] != "float32", *map(str, kind))):
        here = [row for row in mine if all(row[key] == value for key, value in zip(KEYS, kind, strict=True))]
        lines.append([*kind, *(_ratio(here, shape) for shape in SHAPES)])
    title = f"sigmoid top-k ({'native' if path == 'on' else 'reference'}), ratio to torch.softmax of the same dtype and threads"
    return [Table(title, ["dtype", "threads", "scores", "k", *SHAPES], lines)] if lines else []


def _ratio(rows: list[dict[str, Any]], shape: str) -> str:
    here = [row for row in rows if row["shape"] == shape]
    if any("skipped" in row and "mode" not in row for row in here):
        return "skipped"
    found = {row["mode"]: f"{row['ratio']:.2g}" if row["ratio"] < 10 else f"{row['ratio']:.0f}" for row in here if "ratio" in row}
    return " / ".join(found.get(mode, "-") for mode in MODES) if found else ""
