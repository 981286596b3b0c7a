"""The vision examples run from end to end on small files."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("ignite", "safetensors", "matplotlib", "PIL"):
    pytest.importorskip(name)

import khot  # noqa: E402
from khot.train import engine  # noqa: E402
from khot.train.config import TrainConfig  # noqa: E402

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mnist")
    for part, n in (("train", 120), ("t10k", 70)):
        for kind, values in (("images-idx3", torch.randint(0, 256, (n, 28, 28))), ("labels-idx1", torch.arange(n) % 10)):
            header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + bytes(values.flatten().tolist()))
    return folder


def test_canvas(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    canvas = example("canvas")
    short = ["--steps", "2", "--batch", "4", "--test", "8", "--every", "1"]
    files = ["--out", str(tmp_path / "c.png"), "--records", str(tmp_path / "c.jsonl")]
    rows = canvas.main(["--data_dir", str(digits), *short, *files])
    assert [row["method"] for row in rows] == list(canvas.METHODS)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["method"] for line in (tmp_path / "c.jsonl").read_text().splitlines()] == list(canvas.METHODS)
    with pytest.raises(SystemExit):
        canvas.main(["--k", "50"])


def test_the_scorer_learns_by_every_soft_method_and_by_no_other(digits: Path) -> None:
    canvas = example("canvas")
    images, labels = canvas.make_canvases(canvas.load("mnist", digits)[0], 6, torch.Generator().manual_seed(0))
    assert images.shape == (6, 1, 112, 112)
    for method in canvas.METHODS:
        model = canvas.Searcher(method)
        outputs = model(images)
        assert len(outputs) == 6 * (canvas.SAMPLES if method in ("sample", "gumbel") else 1)
        torch.nn.functional.cross_entropy(outputs, labels.repeat(len(outputs) // 6)).backward()
        learns = any(value.grad is not None and bool(value.grad.abs().sum() > 0) for value in model.scorer.parameters())
        assert learns == (method not in ("hard", "random")), method


def test_the_gradient_of_a_drawn_patch_is_that_of_its_logarithm(digits: Path) -> None:
    canvas = example("canvas")
    model, scores = canvas.Searcher("sample"), torch.randn(2, 49, requires_grad=True)
    torch.manual_seed(0)
    mask = model.draw(scores)
    assert mask.shape == (2 * canvas.SAMPLES, 49) and set(mask.detach().unique().tolist()) == {0.0, 1.0}
    share = khot.soft_topk(scores, model.k, model.tau)
    heard = (mask.detach().view(canvas.SAMPLES, 2, 49).sum(0) * share / share.detach().clamp(min=0.05)).sum()
    expected, found = (torch.autograd.grad(value, scores, retain_graph=True)[0] for value in (heard, mask.sum()))
    torch.testing.assert_close(found, expected)


def test_token_reduction(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"dim": 16, "depth": 5, "num_heads": 2}
    settings = TrainConfig(data="mnist", data_dir=digits, out=tmp_path, epochs=1, validation=20, batch_size=50, model_options=options)
    settings.progress = False
    engine.train(settings)
    weights = tmp_path / "model.safetensors"
    for score in ({"score": "cls"}, {"score": "learned", "gradient": "sample"}):
        tuned = dataclasses.replace(settings, out=tmp_path / score["score"], weights=weights, reduce={"at": [1, 3, 4], **score})
        engine.train(dataclasses.replace(tuned, keep=(0.5, 0.5)))
    files = [f"--{name}={tmp_path / file}" for name, file in (("out", "t.png"), ("figure", "f.png"), ("records", "t.jsonl"))]
    more = ["--tuned", *(str(tmp_path / name / "model.safetensors") for name in ("cls", "learned"))]
    rows = example("token_reduction").main([str(weights), "--keep", "0.5", "--count", "70", *files, *more])
    assert len(rows) == 8 and rows[0]["keep"] == 1.0
    assert [(row["choice"], row["keep"]) for row in rows if row["tuned"]] == [("cls attention", 0.5), ("learned, sample", 0.5)]
    assert all(row["macs"] < rows[0]["macs"] for row in rows[1:])
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("t.png", "f.png"))
    printed = capsys.readouterr().out
    assert "cls attention, fused" in printed and "over cls" in printed
    assert example("token_reduction").main([str(weights), *files]) == rows  # from the records


@pytest.mark.slow
def test_certified_pruning(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--data_dir", str(digits), "--weights", str(tmp_path / "vit.pt"), "--figure", str(tmp_path / "figure.png")]
    rows = example("certified_pruning").main(arguments)
    assert {(row["net"], row["domain"]) for row in rows} == {("pruned", "affine"), ("pruned", "box"), ("full", "affine")}
    assert all(row["refuted"] == 0 and row["images"] == 2 for row in rows)
    assert (tmp_path / "figure.png").stat().st_size > 10_000 and (tmp_path / "vit.pt").exists()
    assert "block 0" in capsys.readouterr().out
