"""The slow calls, today's in turns with those of an earlier commit, each in a process of its own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common import Recorder

ROOT = Path(__file__).parent.parent
ROUNDS = 3
# name -> (code that makes the call `f`, the share of the earlier time that is claimed)
SLOW = {
    "perturbed (4096, 64), k=2": ("x = torch.randn(4096, 64); f = lambda: khot.soft_topk(x, 2, method='perturbed')", 0.1),
    "sinkhorn matrix (32, 1000), k=100": ("x = torch.randn(32, 1000); f = lambda: khot.soft_topk_matrix(x, 100, method='sinkhorn')", 0.1),
    "KSubset.joint (32, 1000), k=100": (
        "d = khot.distributions.KSubset(k=100, logits=torch.randn(32, 1000)); f = lambda: d.joint", 0.1),
    "brewer (32, 10^4), k=1000": ("x = torch.randn(32, 10**4); f = lambda: khot.sample_topk(x, 1000, design='brewer')", 0.25),
    "sampford (32, 10^4), k=1000": ("x = torch.randn(32, 10**4); f = lambda: khot.sample_topk(x, 1000, design='sampford')", 0.1),
    "estimators.relaxed_gumbel (32, 1000), k=100": (
        "x = torch.randn(32, 1000, requires_grad=True); "
        "f = lambda: khot.estimators.relaxed_gumbel(lambda m: m.square().sum(-1), x, 100).sum().backward()", 0.1),
}  # fmt: skip
PROBE = """
import time, torch, khot
torch.set_num_threads(1)
torch.manual_seed(0)
{code}
def once():
    began = time.perf_counter()
    f()
    return time.perf_counter() - began
took = once()
print(took if took > 1 else once())  # a short call again: the first one also loads code
"""


def before_rows(commit: str, record: Recorder, built: Path | None = None) -> None:
    """One row for each slow call: the median of its time over that of the earlier commit, whose tree may be ``built`` already."""
    if built is not None:
        return _add_all(record, built.resolve(), commit)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True, capture_output=True)
        try:
            _build(tree)
            _add_all(record, tree, commit)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True, capture_output=True)


def _add_all(record: Recorder, tree: Path, commit: str) -> None:
    for name, (code, bound) in SLOW.items():
        _add(record, name, code, bound, tree, commit)


def _build(tree: Path) -> None:
    subprocess.run([sys.executable, "-m", "khot.kernels.build"], env=_environment(tree), check=True, capture_output=True)


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def _add(record: Recorder, name: str, code: str, bound: float, tree: Path, commit: str) -> None:
    times: dict[Path, list[float]] = {ROOT: [], tree: []}
    for _ in range(ROUNDS):
        for where, found in times.items():
            found.append(_seconds(code, where))
    ratio = statistics.median(now / then for now, then in zip(times[ROOT], times[tree], strict=True))
    seconds = statistics.median(times[ROOT])
    record.add(what=name, over=f"commit {commit}", mode="forward", shape="", bound=bound, seconds=seconds, ratio=ratio)


def _seconds(code: str, tree: Path) -> float:
    command = [sys.executable, "-c", PROBE.format(code=code)]
    return float(subprocess.run(command, env=_environment(tree), capture_output=True, text=True, check=True).stdout)
