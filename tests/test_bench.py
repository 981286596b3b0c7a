"""The benchmarks run, write complete rows, and refuse what is broken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import khot
from bench import choosing, common, gate, plot, temperature, timing
from bench.__main__ import commands
from bench.__main__ import main as bench
from bench.common import LawsRed, affordable, laws_green, race
from bench.figures._choice import cost
from bench.memory import peak, saved
from bench.quality import measures
from bench.seeds import PAIRS, draw, nccs
from bench.timing import Timing
from khot import registry
from khot._record import replace

FACTS = {"bench", "what", "cpu", "cores", "isa", "python", "torch", "khot", "commit"}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """File a relaxation under a name for the length of a test."""

    def file(name: str, topk: Any, **laws: Any) -> str:
        row = replace(khot.RELAXATIONS["sigmoid"], name=name, topk=topk, **laws)
        monkeypatch.setitem(registry._relaxations, name, row)
        gate.laws_green.cache_clear()
        return name

    yield file
    gate.laws_green.cache_clear()


def run(path: Path, *argv: str) -> list[dict[str, Any]]:
    out = path / "rows.jsonl"
    assert bench([*argv, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows and all(row.keys() >= FACTS for row in rows)
    return rows


def test_commands_are_found_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"gradient", "memory", "plot", "quality", "seeds", "speed"} <= set(commands())
    assert bench(["sped"]) == 2
    assert "unknown benchmark 'sped'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sigmoid", "euclidean"])
def test_gate_lets_sound_methods_through(name: str) -> None:
    laws_green(name)


@pytest.mark.parametrize(
    ("law", "topk"),
    [
        ("sum", lambda x, k, tau=1.0: khot.sigmoid_topk(x, k, tau) * 0.999),
        ("bounds", lambda x, k, tau=1.0: khot.sigmoid_topk(x, k, tau) * 3 - 2 * k / x.shape[-1]),
        ("hard limit", lambda x, k, tau=1.0: khot.sigmoid_topk(x, k, 1.0)),
        ("gradient", lambda x, k, tau=1.0: khot.straight_through(khot.sigmoid_topk(x, k, tau), x * 2)),
        ("plain input", lambda x, k, tau=1.0: x.view(-1, 7)),
    ],
)
def test_gate_refuses_what_is_broken(broken: Any, law: str, topk: Any) -> None:
    with pytest.raises(LawsRed, match=law):
        laws_green(broken("wrong", topk))


def test_broken_method_gets_no_figure(broken: Any, tmp_path: Path) -> None:
    name = broken("wrong", lambda x, k, tau=1.0: khot.sigmoid_topk(x, k, tau) * 0.999)
    flags = ["--methods", f"sigmoid,{name}", "--kernels", "off", "--shapes", "64x1024", "--counts", "8", "--dists", "normal"]
    rows = run(tmp_path, "speed", "--quick", *flags, "--dtypes", "float32", "--threads", "1")
    wrong = [row for row in rows if row["what"] == name]
    assert len(wrong) == 1 and "breaks the law of sum" in wrong[0]["refused"] and "seconds" not in wrong[0]
    timed = [row for row in rows if "seconds" in row]
    assert {row["what"] for row in timed} == {"softmax", "sigmoid()", "topk", "sort", "copy", "sigmoid"}
    assert {row["mode"] for row in timed} == {"forward", "forward+backward"}
    assert all(0 < row["low"] <= row["seconds"] <= row["high"] and row["rounds"] >= 1 for row in timed)
    assert all(row["ratio"] == 1 for row in timed if row["what"] == "softmax")
    assert all({"batch", "n", "k", "dist", "dtype", "threads", "kernels"} <= row.keys() for row in timed)


def test_race_takes_turns_and_pairs_rounds() -> None:
    calls: list[str] = []
    found = race({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0.0, rounds=(3, 3))
    assert len(found["a"].times) == len(found["b"].times) == 3
    assert calls.index("b") < len(calls) - calls[::-1].index("a") - 1
    assert Timing([2.0, 20.0, 6.0]).ratio(Timing([1.0, 10.0, 2.0])) == 2.0


def test_expensive_call_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def seconds(call: Any, calls: int) -> float:
        call()
        return 1e-3 * (sizes[-1] / 1024) ** 3

    monkeypatch.setattr(timing, "_measure", seconds)
    reason = affordable(lambda batch, n: sizes.append(n), 1, 2**20, limit=0.5)
    assert reason is not None and "more than 0.5 s" in reason
    assert max(sizes) <= 2**12
    monkeypatch.undo()
    assert affordable(lambda batch, n: None, 16, 4096, limit=0.5) is None


def test_failure_is_a_reason() -> None:
    def fails(batch: int, n: int) -> None:
        raise ValueError("needs a matrix of 5 GB")

    assert "needs a matrix" in str(affordable(fails, 1, 10, limit=1.0))


def test_plot_draws_from_data_alone(tmp_path: Path) -> None:
    flags = ["--kernels", "off", "--methods", "sigmoid", "--shapes", "64x1024", "--dtypes", "float32", "--threads", "1"]
    run(tmp_path, "speed", "--quick", *flags, "--counts", "n/16", "--dists", "normal,ties")
    files = plot.draw_one("speed", tmp_path, tmp_path / "rows.jsonl")
    assert {path.suffix for path in files} == {".png", ".svg"} and all(path.stat().st_size > 5000 for path in files)


def test_seeds_reproduces_a_published_cell(tmp_path: Path) -> None:
    flags = ["--pairs", "64:8,64:32", "--items", "64", "--methods", "halving,iterative,sigmoid", "--threads", "1"]
    rows = run(tmp_path, "seeds", "--quick", *flags)
    found = {(row["what"], row["setting"], row["n"], row["k"]): row for row in rows}
    assert found["halving", "published", 64, 8]["nccs"] == pytest.approx(0.976, abs=0.02)
    assert found["iterative", "published", 64, 8]["nccs"] == pytest.approx(0.217, abs=0.04)
    assert found["iterative", "best", 64, 8]["nccs"] > 0.9 > found["iterative", "published", 64, 8]["nccs"]
    assert found["sigmoid", "default", 64, 8]["nccs"] == pytest.approx(1.0, abs=1e-5)  # it only scales the items
    assert all(row["seconds"] > 0 and row["items"] in (32, 64) for row in rows)
    assert len(plot.draw_one("seeds", tmp_path, tmp_path / "rows.jsonl")) == 6


def test_the_protocol_has_85_pairs() -> None:
    assert len(PAIRS) == 85
    x, v = draw(64, 2, seed=0)
    assert -1 <= x.min() < x.max() <= 1 and 0 <= v.min() < v.max() <= 1 and x.shape == (2, 64, 32)
    assert nccs(x, x.flip(-2)) == pytest.approx([1.0, 1.0])
    assert nccs(torch.eye(3)[:1], torch.eye(3)[1:]) == 0


def test_quality_and_gradient(tmp_path: Path) -> None:
    rows = run(tmp_path, "quality", "--quick", "--methods", "sigmoid,euclidean")
    sharp, flat = rows[0], rows[10]
    assert sharp["tau"] < flat["tau"] and sharp["distance"] < 0.05 < flat["distance"] and sharp["entropy"] < 0.05 < 0.9 < flat["entropy"]
    assert plot.draw_one("quality", tmp_path, tmp_path / "rows.jsonl")
    rows = run(tmp_path, "gradient", "--quick", "--methods", "sigmoid")
    assert max(row["cosine"] for row in rows if row["test"] == "agreement") > 0.8
    assert max(row["solved"] for row in rows if row["test"] == "toy") == 1
    assert plot.draw_one("gradient", tmp_path, tmp_path / "rows.jsonl")


def test_choosing_times_every_method_that_is_asked_for(tmp_path: Path) -> None:
    rows = run(tmp_path, "choosing", "--quick", "--methods", "sigmoid,softsort")
    (table,) = choosing.tables(rows)
    assert {line[0] for line in table.rows} == {"sigmoid", "softsort"}
    assert cost("sigmoid", rows) == next(row["ratio"] for row in rows if row["what"] == "sigmoid" and row["mode"] == "forward+backward")
    assert cost("network", rows) is None


def test_measures_of_the_hard_mask_are_zero() -> None:
    scores = torch.randn(4, 20, dtype=torch.float64)
    assert measures(khot.topk_mask(scores, 5), scores, 5) == {"distance": 0, "entropy": 0, "kept": 1, "sum_error": 0}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the resident memory is read from /proc")
def test_memory(tmp_path: Path) -> None:
    x = torch.zeros(1, 3 << 22)  # blocks above 32 MB always go back to the system
    three = peak(lambda: (x * 2 + torch.ones_like(x).expand(3, -1)).sum(0))
    assert 3.5 * x.nbytes < three < 8 * x.nbytes
    assert saved(lambda leaf, k: torch.softmax(leaf, -1), x, 1) == x.nbytes
    assert saved(lambda leaf, k: leaf * 2, x, 1) == 0
    rows = run(tmp_path, "memory", "--quick", "--kernels", "off", "--methods", "sigmoid")
    assert {row["what"] for row in rows} == {"softmax", "topk", "sort", "sigmoid"}
    assert plot.draw_one("memory", tmp_path, tmp_path / "rows.jsonl")


def test_page_and_targets_come_from_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert bench(["targets"]) == 0  # nothing measured, nothing broken
    row = {"what": "sigmoid", "kind": "method", "kernels": "on", "dtype": "float32", "mode": "forward", "dist": "normal", "count": "8"}
    record = common.Recorder("speed", tmp_path / "speed.jsonl")
    record.add(**row, shape="64x1024", threads=1, ratio=1.2, seconds=1.0)
    assert bench(["targets"]) == 0
    record.add(**row, shape="4096x64", threads=1, ratio=1.4, seconds=1.0)
    assert bench(["targets"]) == 1
    assert "1.4" in capsys.readouterr().out
    assert bench(["page", "--out", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| sigmoid, forward, short rows | <= 1.3 | 1.4 | sigmoid, 4096x64, normal, 8, 1 | no |" in page and "## Speed" in page


def test_the_temperature_at_a_gap_lies_between_the_measured_ones() -> None:
    line = [(0.01, 0.02), (0.1, 0.08), (1.0, 0.3)]
    assert temperature.crossing(line, 0.08) == pytest.approx(0.1)
    assert 0.1 < (temperature.crossing(line, 0.1) or 0) < 1.0
    assert temperature.crossing(line, 0.5) is None
