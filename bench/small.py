"""Small calls, where Python's share shows: today's in turns with those of an earlier commit, each in a process of its own.

A batch without rows leaves a kernel nothing to do. What its call takes beyond PyTorch's own part, a tensor of the same size or a node of
autograd that makes one in each direction, is what Python spends between the verb and the kernel.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import Recorder, Table, parser, print_tables, progress, recorder

ROOT = Path(__file__).parent.parent
SHAPES = ((0, 1024, 32), (1, 8, 2), (64, 64, 8), (64, 1024, 32))
ROUNDS = 5
CALLS = {
    "an empty tensor": "torch.empty_like(x)",
    "an empty tensor, forward + backward": "torch.autograd.grad(apply(leaf, None), leaf, cotangent)",
    "torch.softmax": "torch.softmax(x, -1)",
    "soft_topk": "khot.soft_topk(x, k)",
    "soft_topk, forward + backward": "torch.autograd.grad(khot.soft_topk(leaf, k), leaf, cotangent)",
    "torch.softmax, forward + backward": "torch.autograd.grad(torch.softmax(leaf, -1), leaf, cotangent)",
    "soft_topk(hard=True), forward + backward": "torch.autograd.grad(khot.soft_topk(leaf, k, hard=True), leaf, cotangent)",
    "topk_mask": "khot.topk_mask(x, k)",
    "sample_topk": "khot.sample_topk(x, k)",
}
PROBE = """
import json, statistics, sys, time, torch, khot
torch.set_num_threads(1)
torch.manual_seed(0)
class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan):
        y = torch.empty_like(x)
        ctx.save_for_backward(y)
        ctx.plan = plan
        return y
    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(ctx.saved_tensors[0]), None
apply = super(torch.autograd.Function, Nothing).apply  # without the look for transforms, which is a part of the call
calls, shapes = json.loads(sys.argv[1])
found = []
for batch, n, k in shapes:
    x = torch.randn(batch, n)
    leaf, cotangent = x.clone().requires_grad_(), torch.randn(batch, n)
    for name, code in calls.items():
        call = eval("lambda: " + code)
        try:
            for _ in range(30):
                call()
        except Exception:
            continue
        times = []
        for _ in range(15):
            began = time.perf_counter()
            for _ in range(30):
                call()
            times.append((time.perf_counter() - began) / 30)
        found.append([name, [batch, n, k], statistics.median(times)])
print(json.dumps(found))
"""


def main(argv: list[str]) -> int:
    options = parser("small", __doc__)
    options.add_argument("--before", metavar="COMMIT", default="9d11a4f", help="the earlier commit")
    options.add_argument("--tree", type=Path, help="a working tree of it with its native library built, instead of a new one")
    given = options.parse_args(argv)
    record = recorder("small", given)
    with _tree(given.before) if given.tree is None else _given(given.tree) as tree:
        _compare(record, tree, given.before, 1 if given.quick else ROUNDS)
    print_tables(tables(record.rows))
    return 0


def _compare(record: Recorder, tree: Path, commit: str, rounds: int) -> None:
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for _ in progress(list(range(rounds)), "small"):
        for where, root in (("now", ROOT), ("before", tree)):
            for name, shape, seconds in _probe(root):
                times.setdefault((name, str(tuple(shape))), {"now": [], "before": []})[where].append(seconds)
    for (name, shape), found in times.items():
        now = statistics.median(found["now"])
        before = statistics.median(found["before"]) if found["before"] else None
        record.add(what=name, shape=shape, over=f"commit {commit}", seconds=now, before=before, ratio=now / before if before else None)


def _probe(root: Path) -> list[Any]:
    command = [sys.executable, "-c", PROBE, json.dumps([CALLS, SHAPES])]
    out = subprocess.run(command, env=_environment(root), cwd=root, capture_output=True, text=True, check=True).stdout
    return json.loads(out)


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}


@contextmanager
def _given(tree: Path) -> Iterator[Path]:
    yield tree.resolve()


@contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """A working tree of the commit, with its native library."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True, capture_output=True)
        try:
            subprocess.run([sys.executable, "-m", "khot.kernels.build"], env=_environment(tree), cwd=tree, check=True, capture_output=True)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True, capture_output=True)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    lines = [
        [row["what"], row["shape"], *(f"{1e6 * row[key]:.1f}" if row[key] else "fails" for key in ("before", "seconds")), _times(row)]
        for row in rows
    ]
    head = ["call", "(batch, n, k)", "before", "now", "now / before"]
    return [Table("microseconds a call, one thread", head, lines), Table("microseconds in Python", head, _in_python(rows))]


def _in_python(rows: list[dict[str, Any]]) -> list[list[str]]:
    """What is left of the calls on a batch without rows when PyTorch's own part is taken away."""
    empty = {row["what"]: row for row in rows if row["shape"].startswith("(0,") and row["before"]}
    lines = []
    for name, row in empty.items():
        own = empty.get("an empty tensor" + name.removeprefix("soft_topk"))
        if own is None or not name.startswith("soft_topk"):
            continue
        before, now = row["before"] - own["before"], row["seconds"] - own["seconds"]
        lines.append([name, row["shape"], f"{1e6 * before:.1f}", f"{1e6 * now:.1f}", f"{now / before:.2f}"])
    return lines


def _times(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f}" if row["ratio"] else ""
