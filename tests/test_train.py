"""The training engine: a resumed run is the run, data are read right, bad input is refused and nothing is overwritten."""

import csv
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("ignite", "jsonargparse", "safetensors", "PIL", "rich"):
    pytest.importorskip(name)

from khot.cli import main  # noqa: E402
from khot.train import checkpoint, engine, records  # noqa: E402
from khot.train.config import TrainConfig, differences, from_json, parse  # noqa: E402
from khot.train.evaluate import open_model  # noqa: E402
from tests.training import HARD_CASE, SMALL, config, write_data  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("idx"))


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
    settings = config(data, tmp_path, epochs=12, amp=amp, pad=0, mixup=0.0, cutmix=0.0, erase=0.0, flip=False)
    record = engine.train(settings)
    assert record["top1"] > 60
    assert records.unpack(record["correct"]).float().mean().item() * 100 == pytest.approx(record["top1"], abs=1e-4)
    assert main(["eval", str(tmp_path / "model.safetensors")]) == 0
    assert f"top-1  {record['top1']:.2f}" in capsys.readouterr().out
    assert engine.train(settings)["finished"] == record["finished"]  # not run again


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


def test_configurations_go_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--recipe", "cifar10", "--model", "topk", "--model_options.k", "12", "--keep", "[1.0, 0.5]", "--seed=3", "--reduce.at", "[1]"]
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
        (["--model_options.dimm", "3"], "model_options do not fit vit: "),
        (["--model_options.depth", "0"], "depth must be a whole number of at least 1, got 0"),
        (["--reduce", '{"at": [0], "scor": "cls"}'], "reduce does not fit: "),
        (["--keep", "[0.5, 0.5]"], "drops no tokens without reduce"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used: "),
        (["--mixup", "-1"], "mixup must not be negative, got -1.0"),
        (["--erase", "2"], "erase must lie in [0, 1], got 2.0"),
    ],
)
def test_bad_settings(data: Path, tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--data", "mnist", "--data_dir", str(data), "--out", str(tmp_path), "--validation", "20", "--batch_size", "20"]
    base += ["--model_options.image_size", "8"]
    assert main(["train", *base, "--progress", "false", *flags]) == 1
    assert says in capsys.readouterr().err


def test_a_finished_run_is_not_taken_for_another(data: Path, tmp_path: Path) -> None:
    engine.train(config(data, tmp_path, epochs=1))
    with pytest.raises(ValueError, match=r"record.json is of another run \(lr: 0.005 -> 0.1\)"):
        engine.train(config(data, tmp_path, epochs=1, lr=0.1))
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ValueError, match=r"record.json is no record of a run"):
        engine.train(config(data, tmp_path, epochs=1))
    assert (tmp_path / "record.json").read_text() == "{"


def test_foreign_files_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors", {"config": '{"colour": 1}', "num_classes": "10"})
    assert main(["eval", str(tmp_path / "other.safetensors")]) == 1
    assert "it holds colour, which is no setting of a run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="are of another model"):
        engine.train(config(data, tmp_path / "run", weights=tmp_path / "other.safetensors"))
    for state in ({"step": 3}, [1]):
        torch.save(state, tmp_path / "checkpoint.pt")
        before = (tmp_path / "checkpoint.pt").read_bytes()
        with pytest.raises(ValueError, match="no checkpoint of such a run"):
            engine.train(config(data, tmp_path))
        assert (tmp_path / "checkpoint.pt").read_bytes() == before


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


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], pause: float) -> None:
    while process.poll() is None and not condition():
        time.sleep(pause)


def kill_once(data: Path, out: Path, flags: list[str], rng: random.Random, *, in_a_save: bool) -> bool:
    """Start or resume, let at least one checkpoint be written, then kill -9; whether a half-written file was left."""
    path, part = out / "checkpoint.pt", out / "checkpoint.pt.part"
    seen = path.stat().st_mtime_ns if path.exists() else 0
    process = start(data, out, *flags)
    wait_for(lambda: path.exists() and path.stat().st_mtime_ns != seen, process, 0.005)
    if in_a_save:
        wait_for(part.exists, process, 0.0)
    else:
        time.sleep(rng.random() * 0.2)
    assert process.poll() is None, "the run ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return part.exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_kill_at_twenty_moments_and_in_a_save(data: Path, tmp_path: Path, workers: str) -> None:
    flags = ["--epochs", "100", "--save_every", "1", "--ema", "0.9", "--accumulate", "2", "--tau", "[2.0, 0.5]", "--workers", workers]
    assert start(data, tmp_path / "whole", *flags).wait() == 0
    rng, out = random.Random(0), tmp_path / "broken"
    halves = [kill_once(data, out, flags, rng, in_a_save=i % 2 == 1) for i in range(20)]
    assert any(halves)  # at least one save was cut in the middle
    assert start(data, out, *flags).wait() == 0
    assert same(weights(tmp_path / "whole"), weights(out))


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
    one, two = (torch.tensor([float(row["loss"]) for row in log]) for log in logs)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    for one, other in zip(weights(tmp_path / "one").values(), weights(tmp_path / "two").values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
