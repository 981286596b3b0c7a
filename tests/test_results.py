"""The results table and the records it is made of."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("ignite", "jsonargparse", "safetensors", "PIL", "rich"):
    pytest.importorskip(name)

from khot.cli import main  # noqa: E402
from khot.train import records, results  # noqa: E402
from khot.train.config import TrainConfig  # noqa: E402


def record(model: str, data: str, seed: int, top1: float, **changes: Any) -> records.Record:
    correct = torch.arange(1000) < top1 * 10
    base = {"parameters": 731842, "macs": 35_000_000, "images_per_second": 500.0, "cpu_minutes": 12.0, "off_diagonal": [0.5, 0.25]}
    settings = json.loads(TrainConfig(model=model, data=data, seed=seed).to_json())
    return (
        base
        | {"model": model, "data": data, "seed": seed, "top1": top1, "top5": 99.0, "correct": records.pack(correct), "config": settings}
        | changes
    )


def test_results_from_three_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    for each in (
        record("vit", "fashion_mnist", 0, 90.0),
        record("vit", "fashion_mnist", 1, 91.0),
        record("topk_dynamic", "cifar10", 0, 60.0),
    ):
        records.append(path, each)
    assert main(["results", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| Model | Dataset | Top-1 | Top-5 |")
    assert "| ViT | Fashion-MNIST | 90.50 ± 0.71 | 99.00 ± 0.00 | 0.73 M | 35 M | 500 |  | 1 | 10 | 2 | 12 | 0.50 0.25 |" in lines
    assert any(line.startswith("| TopKDynamicModel | CIFAR-10 | 60.00 |") for line in lines)
    missing = [line for line in lines if "not run" in line]
    assert len(missing) == 3 * len(results.TITLES) - 2
    assert "| TopKDynamicModel | ImageNet | not run | `khot train --recipe imagenet --model topk_dynamic" in "\n".join(missing)


def test_a_row_says_what_differs_from_the_preset_and_other_records_are_no_rows() -> None:
    tuned = record("vit", "cifar10", 0, 60.0)
    tuned["config"] |= {"model_options": {"image_size": 32, "dim": 64, "stem": "conv"}, "weights": "base.safetensors", "keep": [0.5, 0.5]}
    tuned["config"] |= {"reduce": {"score": "learned", "gradient": "sample"}}
    rows = results.table([{"method": "relaxed", "top1": 90.0}, tuned])
    assert [row[0] for row in rows if row[1:3] == ["CIFAR-10", "60.00"]] == ["ViT, dim 64, conv, tokens by learned, sample, tuned"]
    assert len(rows) == 1 + 3 * len(results.TITLES)


def test_a_later_record_of_a_run_counts_and_comparison_is_paired() -> None:
    old, new = record("vit", "mnist", 0, 50.0), record("vit", "mnist", 0, 60.0)
    (only,) = results.group([old, new])
    assert only.runs == [new]
    points, low, high = results.compare(new, old)
    assert points == pytest.approx(10) and low == pytest.approx(10 - 1.96 * 100 * (0.1 * 0.9 / 1000) ** 0.5) and high > points
    assert set(results.TITLES) == set(__import__("khot").models.MODELS)


def test_bad_records_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\nnot json\n")
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2"):
        records.read([tmp_path])
    assert main(["results", str(tmp_path / "none.jsonl")]) == 1
    assert main(["eval", str(tmp_path / "none.safetensors")]) == 1
    (tmp_path / "w.safetensors").write_bytes(b"0123456789")
    assert main(["eval", str(tmp_path / "w.safetensors")]) == 1
    assert "no whole safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "line 1 is no record"), ("[1]", "line 1 is no record"), ('{"config": {}}', "has no data, model, seed, top1, top5")],
)
def test_what_is_no_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    (tmp_path / "records.jsonl").write_text(line + "\n")
    assert main(["results", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err
