"""What was promised beside what was measured: each claim with its worst case in the data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from bench.common import NATIVE, Table, load, print_tables, same
from bench.seeds_report import summary, times_faster
from bench.verbs import kernel_of

Row = dict[str, Any]
LONG = ("1x1000000", "1x100000", "16x16384", "256x32768")
SHORT = ("64x1024", "4096x64")
EASY, HARD = ("normal",), ("scale100", "cauchy")
CELL = ("shape", "dist", "count", "threads", "mode")


def main(argv: list[str]) -> int:
    """Exits with 1 if a claim does not hold."""
    argparse.ArgumentParser(prog="python -m bench targets", description=__doc__).parse_args(argv)
    found = tables()
    print_tables(found)
    return int(any(line[-1] == "no" for table in found for line in table.rows))


def tables(rows: list[Row] | None = None) -> list[Table]:
    """One line a claim; without data for it, a line that says so."""
    speed, memory, seeds = load("speed"), load("memory"), load("seeds")
    plain = [{**row, "what": f"{row['what']} in plain PyTorch"} for row in load("reference") if "bound" in row]
    lines = [*_verbs([*load("verbs"), *plain]), *_speed(speed), *_rivals(speed), *_memory(memory), *_seeds(seeds), *_linear(load("linear"))]
    return [Table("promised and measured", ["claim", "bound", "worst measured", "where", "holds"], lines)]


def _line(claim: str, bound: float, rows: Iterable[Row], value: Callable[[Row], float]) -> list[str]:
    """The row with the largest value against an upper bound."""
    found = list(rows)
    if not found:
        return [claim, f"<= {bound:g}", "not measured", "", ""]
    worst = max(found, key=value)
    where = ", ".join(str(worst[key]) for key in ("what", "shape", "dist", "count", "threads") if key in worst)
    return [claim, f"<= {bound:g}", f"{value(worst):.3g}", where, "yes" if value(worst) <= bound else "no"]


def _verbs(rows: list[Row]) -> list[list[str]]:
    """One line a call, mode, rival and instruction set: the cell that comes nearest to its bound, or lies farthest above it."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in (row for row in rows if "bound" in row):
        groups.setdefault((row["what"], row["mode"], row["over"], kernel_of(row)), []).append(row)
    return [_verb(f"{what}, {mode}, over {over}", kernel, mine) for (what, mode, over, kernel), mine in groups.items()]


def _verb(claim: str, kernel: str, rows: list[Row]) -> list[str]:
    worst = max((row for row in rows if "ratio" in row), key=lambda row: row["ratio"] / row["bound"], default=None)
    if worst is None:
        return [claim, f"<= {rows[0]['bound']:g}", f"not measured: {rows[0]['skipped']}", kernel, ""]
    where = ", ".join(part for part in (worst["shape"], kernel) if part)
    return [claim, f"<= {worst['bound']:g}", f"{worst['ratio']:.3g}", where, "yes" if worst["ratio"] <= worst["bound"] else "no"]


def _speed(rows: list[Row]) -> list[list[str]]:
    """Ratios to softmax in float32."""

    def pick(methods: Iterable[str], shapes: Iterable[str], dists: Iterable[str], mode: str) -> list[Row]:
        timed = [row for row in rows if "ratio" in row and same(row, kind="method", kernels="on", dtype="float32", mode=mode)]
        return [row for row in timed if row["what"] in methods and row["shape"] in shapes and row["dist"] in dists]

    def ratio(row: Row) -> float:
        return row["ratio"]

    lines = []
    for who, methods, times in (("sigmoid", ("sigmoid",), 1), ("the other kernels", NATIVE[1:], 2)):
        for mode, long, short in (("forward", 1.0, 1.3), ("forward+backward", 1.3, 1.6)):
            lines.append(_line(f"{who}, {mode}, long rows", times * long, pick(methods, LONG, EASY, mode), ratio))
            lines.append(_line(f"{who}, {mode}, short rows", times * short, pick(methods, SHORT, EASY, mode), ratio))
        lines.append(_line(f"{who}, forward, hard scores, long rows", times * 2.0, pick(methods, LONG, HARD, "forward"), ratio))
        lines.append(_line(f"{who}, forward, hard scores, short rows", times * 4.0, pick(methods, SHORT, HARD, "forward"), ratio))
    return lines


def _rivals(rows: list[Row]) -> list[list[str]]:
    """Time over that of ``torch.topk`` (k >= n/16), and of the fastest peer, on the same input; each as a ratio to softmax beside it."""
    timed = [row for row in rows if "ratio" in row and same(row, kernels="on", dtype="float32")]
    mine = [row for row in timed if row["what"] == "sigmoid"]
    topk = _fastest(row for row in timed if row["what"] == "topk" and row["count"] in ("n/16", "n/2"))
    peer = _fastest(row for row in timed if row["kind"] == "peer")

    def line(claim: str, rival: dict[tuple[Any, ...], float]) -> list[str]:
        met = [row for row in mine if _cell(row) in rival]
        return _line(f"sigmoid's time over that of {claim}", 1.0, met, lambda row: row["ratio"] / rival[_cell(row)])

    return [line("torch.topk, k >= n/16", topk), line("the fastest peer", peer)]


def _cell(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in CELL)


def _fastest(rows: Iterable[Row]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        best[_cell(row)] = min(row["ratio"], best.get(_cell(row), float("inf")))
    return best


def _memory(rows: list[Row]) -> list[list[str]]:
    native = [row for row in rows if "saved" in row and row["what"] in NATIVE and row["kernels"] == "on"]
    return [
        _line("native: kept for backward, over the output", 1.01, native, lambda row: row["saved_ratio"]),
        _line("native: peak beyond input and output, over the input", 0.05, native, lambda row: row["forward_peak_ratio"]),
    ]


def _seeds(rows: list[Row]) -> list[list[str]]:
    lines = []
    for method in ("halving", "iterative"):
        found = summary(rows, method)
        for key, claim in (("mean absolute deviation", "published cells"), ("apart by", "mean of all 85 cells")):
            given = [{"value": found[key]}] if key in found else []
            lines.append(_line(f"{method}: nCCS off the published, {claim}", 0.02, given, lambda row: row["value"]))
    ratios = [{"shape": cell, "k": cell[1], "slower": 1 / ratio} for cell, ratio in times_faster(rows).items()]
    top = [row for row in ratios if row["shape"] == (16384, 2048)]
    lines.append(_line("halving's time over iterative's at (16384, 2048)", 0.05, top, lambda row: row["slower"]))
    lines.append(_line("halving's time over iterative's, k >= 8", 1.0, [row for row in ratios if row["k"] >= 8], lambda row: row["slower"]))
    return lines


def _linear(rows: list[Row]) -> list[list[str]]:
    """Rows of 10^5 scores and more: time over softmax's, and how that grows from 10^5 on: linear, no worse where memory is the limit."""
    times = {(row["what"], row["n"]): row["seconds"] for row in rows if same(row, mode="forward")}
    lengths = {what: sorted(n for name, n in times if name == what and n >= 10**5) for what in dict.fromkeys(what for what, _ in times)}
    over = {(what, n): time / times["softmax", n] for (what, n), time in times.items()}
    far = [{"shape": f"n = {n:.0e}", "ratio": over["sigmoid", n]} for n in lengths.get("sigmoid", [])]
    flat = [
        {"what": what, "shape": f"n = {n:.0e}", "ratio": over[what, n] / over[what, 10**5]}
        for what in ("sigmoid", "topk_mask", "soft_topk(hard=True)", "sample_topk") for n in lengths.get(what, [])[1:]
    ]  # fmt: skip
    return [
        _line("one row, n = 10^5 to 10^8: time over softmax's", 1.5, far, lambda row: row["ratio"]),
        _line("one row, n = 10^5 to 10^8: the same over that at 10^5", 1.5, flat, lambda row: row["ratio"]),
    ]
