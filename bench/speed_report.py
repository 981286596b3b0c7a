"""The table at the end of a speed run."""

from __future__ import annotations

from typing import Any

from bench.common import THRESHOLD, print_table, same
from bench.speed_cells import MODES, SHAPES


def report(rows: list[dict[str, Any]]) -> None:
    """Ratio to softmax, forward / forward + backward, on the plain cells."""
    plain = [row for row in rows if same(row, count="n/16", dist="normal", dtype="float32", threads=1)]
    names = list(dict.fromkeys((row["what"], row["kind"], row["kernels"]) for row in plain))
    native = any(kernels == "on" for _, _, kernels in names)
    lines = []
    for what, kind, kernels in names:
        if kernels == "off" and kind != "method" and native:
            continue
        mine = [row for row in plain if same(row, what=what, kernels=kernels)]
        cells = [_ratio(mine, shape) for shape in SHAPES]
        lines.append([f"{what} ({'native' if kernels == 'on' else 'reference'})" if what in THRESHOLD else what, *cells])
    print_table("ratio to torch.softmax, forward / forward + backward; k = n/16, normal scores, float32, 1 thread", ["", *SHAPES], lines)
    skipped = sum("skipped" in row for row in rows)
    print(f"{len(rows)} rows, {skipped} of them say why something was not timed; every ratio is against softmax in the same run")


def _ratio(rows: list[dict[str, Any]], shape: str) -> str:
    here = [row for row in rows if row["shape"] == shape]
    if any("skipped" in row and "mode" not in row for row in here):
        return "skipped"
    found = {row["mode"]: f"{row['ratio']:.2g}" if row["ratio"] < 10 else f"{row['ratio']:.0f}" for row in here if "ratio" in row}
    return " / ".join(found.get(mode, "-") for mode in MODES) if found else ""
