"""Sharded verbs equal the plain ones: 2, 3 and 4 gloo processes run the cases, started once for the whole file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import khot
from tests.distributed.cases import CASES

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds for all processes together, on a busy machine


def launch(*names: str) -> list[dict]:
    """What the processes report of these cases, or of all that are not slow."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(khot.__file__).parents[1])])}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.launch", *names],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        orphans = True
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                orphans = False
            else:
                process.wait()
    assert process.returncode == 0, err
    assert not orphans, "processes were left behind"
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    return launch()


@pytest.fixture(scope="module")
def slow_reports() -> list[dict]:
    return launch(*(name for name, case in CASES.items() if case.slow))


def pairs(slow: bool) -> list[tuple[str, int]]:
    return [(name, world) for name, case in CASES.items() for world in case.worlds if case.slow is slow]


def judge(reports: list[dict], name: str, world: int) -> None:
    found = [report for report in reports if report["case"] == name and report["world"] == world]
    assert sorted(report["rank"] for report in found) == list(range(world)), "a rank did not report"
    errors = [report for report in found if report["error"]]
    assert not errors, "\n".join(f"rank {report['rank']}: {report['error']}" for report in errors)


@pytest.mark.parametrize(("name", "world"), pairs(slow=False))
def test_case(reports: list[dict], name: str, world: int) -> None:
    judge(reports, name, world)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), pairs(slow=True))
def test_slow_case(slow_reports: list[dict], name: str, world: int) -> None:
    judge(slow_reports, name, world)


@pytest.mark.parametrize(("world", "seconds"), [(3, 6), (2, 8), (4, 6)], ids=["killed", "never comes", "fails"])
def test_a_lost_rank_makes_the_others_raise(reports: list[dict], world: int, seconds: float) -> None:
    """The patience of the group is 3 seconds here."""
    found = {report["rank"]: report for report in reports if report["case"] == "lost" and report["world"] == world}
    assert sorted(found) == [rank for rank in range(world) if rank != 1]
    for report in found.values():
        assert report["error"] and report["seconds"] < seconds, report


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        khot.distributed.soft_topk(torch.zeros(3), 1)
