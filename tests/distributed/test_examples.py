"""The example on sharded items, the benchmark, and the model of what a call costs on many devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import khot
from bench.common import THRESHOLD
from bench.wire import Call, Network, predict, rounds_of, scan, simulate

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(khot.__file__).parents[1])])}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns_and_sends_little() -> None:
    words = run("examples/sharded_retrieval.py", "--quick").splitlines()[-1].split()
    processes, glimpse, learned = int(words[0]), float(words[1].rstrip("%")), float(words[2].rstrip("%"))
    computing, communicating, collectives, sent = (float(word) for word in words[3:] if word != "s")
    assert processes == 2 and learned > 2 * glimpse > 2
    assert computing > 0 and communicating > 0 and 3 <= collectives <= 11 and sent < 500


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    run("-m", "bench", "distributed", "--quick", "--items", "20000", "--methods", "sigmoid", "--out", str(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["what"] for row in rows} == {"overhead", "call", "model"}
    two = [row for row in rows if row["what"] == "call" and row["processes"] == 2]
    assert all(1 <= row["all_reduces"] <= 8 and 1 <= row["all_reduces_backward"] <= 2 for row in two)
    assert max(row["bytes"] for row in two) <= 80 + 8 * 16  # whatever the length


@pytest.mark.parametrize("method", THRESHOLD)
def test_rounds_do_not_depend_on_the_length(method: str) -> None:
    calls = [rounds_of(method, items=items) for items in (4_000, 64_000)]
    assert all(2 <= call.rounds <= 8 and call.sent <= 16 for call in calls)


@pytest.mark.parametrize("devices", [1, 2, 64])
def test_the_simulation_agrees_with_the_formula(devices: int) -> None:
    call = Call(items=10**9, rounds=6, sent=16)
    network = Network(devices)
    assert simulate(network, call) == pytest.approx(predict(network, call), rel=1e-9)
    # With jitter every round waits for the slowest: no more than all passes at their slowest.
    most = predict(network, call) + 0.2 * call.rounds * scan(network, call)
    assert predict(network, call) < simulate(replace(network, jitter=0.2), call) <= most * (1 + 1e-9)


def test_latency_counts_by_the_rounds_and_bytes_do_not() -> None:
    call, network = Call(items=64 * 10**4, rounds=6, sent=16), Network(64)
    slower = simulate(replace(network, latency=network.latency + 1e-3), call) - simulate(network, call)
    assert slower == pytest.approx((1 + call.rounds) * 6 * 1e-3)
    assert simulate(network, replace(call, sent=160)) - simulate(network, call) < 1e-6
    with pytest.raises(ValueError, match="power of two"):
        simulate(Network(6), call)
