"""Starts sets of gloo processes on the loopback interface, runs the cases in them and reports as JSON lines.

``python -m tests.distributed.launch [CASE...]`` imports torch once and forks; no process outlives its parent.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.tensor  # takes seconds, once

LIMIT = 180  # seconds that a set of processes may take
PATIENCE = datetime.timedelta(seconds=60)  # that a collective may take


def start(world: int, body: Callable[[int, int], list[dict]], patience: datetime.timedelta = PATIENCE) -> list[dict]:
    """What ``body(rank, world)`` reports on every rank; a rank that ends without a report is left out."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, world, body, folder, patience) for rank in range(world)]
        _wait(children)
        reports = []
        for rank in range(world):
            path = f"{folder}/report{rank}"
            if os.path.exists(path):
                with open(path) as file:
                    reports += json.load(file)
        return reports


def _fork(rank: int, world: int, body: Callable[[int, int], list[dict]], folder: str, patience: datetime.timedelta) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: go with the parent
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=patience)
        report = body(rank, world)
        with open(f"{folder}/part{rank}", "w") as file:
            json.dump(report, file)
        os.rename(f"{folder}/part{rank}", f"{folder}/report{rank}")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait(children: list[int]) -> None:
    """Until all have ended, or the time is over and they are ended."""
    left, until = set(children), time.monotonic() + LIMIT
    while left and time.monotonic() < until:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run_cases(rank: int, world: int) -> list[dict]:
    from khot.distributed import _wire
    from tests.distributed.cases import CASES

    if world < 4:
        _wire.SHORT = 0  # so that short rows show what long ones do
    report, wanted = [], sys.argv[1:]
    for name, case in CASES.items():
        if world not in case.worlds or (name not in wanted if wanted else case.slow):
            continue
        begin, error = time.monotonic(), ""
        try:
            case.run(rank, world)
        except Exception:
            error = traceback.format_exc()
        report.append({"world": world, "rank": rank, "case": name, "error": error, "seconds": time.monotonic() - begin})
    return report


def run_losses(rank: int, world: int) -> list[dict]:
    """Rank 1 is killed before its second call, or fails, or never comes to it: what do the others see, and when?"""
    import khot

    scores = torch.zeros(2, 5)
    khot.distributed.soft_topk(scores, 2)
    if rank == 1:
        if world == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if world == 4:
            os._exit(1)
        time.sleep(8)
        return []
    begin, error = time.monotonic(), ""
    try:
        khot.distributed.soft_topk(scores, 2)
    except Exception as caught:
        error = type(caught).__name__
    return [{"world": world, "rank": rank, "case": "lost", "error": error, "seconds": time.monotonic() - begin}]


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    report = []
    for world in (2, 3, 4):
        report += start(world, run_cases)
    for world in () if sys.argv[1:] else (2, 3, 4):
        report += start(world, run_losses, datetime.timedelta(seconds=3))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
