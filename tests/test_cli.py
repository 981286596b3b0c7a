"""The command: what it prints, what it leaves behind, how it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import khot
from khot.cli import main
from khot.demo import data, training


def test_methods_and_designs_list_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == sorted(khot.RELAXATIONS)
    assert main(["designs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == sorted(khot.DESIGNS)


def test_info_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert khot.__version__ in printed


def test_version_and_help_as_a_process() -> None:
    done = subprocess.run([sys.executable, "-m", "khot", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"khot {khot.__version__}")


@pytest.mark.parametrize("arguments", [[], ["demo", "--method", "nothing"], ["demo", "--k", "65"], ["demo", "--seeds", "0"]])
def test_bad_arguments_end_with_an_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code not in (0, None)


def test_without_a_command_all_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    said = capsys.readouterr().err
    for command in ("demo", "explore", "train", "eval", "results", "methods", "designs", "info"):
        assert f"\n    {command} " in said


def test_small_demo_draws_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "demo.png"
    assert main(["demo", "--k", "4", "8", "--seeds", "2", "--steps", "6", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "mutual information" in printed
    assert "demo.png" in printed.replace("\n", "")


def test_demo_split_keeps_the_test_part_apart() -> None:
    split = data.load(3)
    for seed in range(3):
        parts = [
            {tuple(row) for row in part.images.view(-1, 64).tolist()}
            for part in split._replace(
                train=data.Part(split.train.images[seed], split.train.labels[seed]),
                validation=data.Part(split.validation.images[seed], split.validation.labels[seed]),
            )
        ]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 1797
    assert not torch.equal(split.train.labels[0], split.train.labels[1])


def test_demo_learns_more_than_chance_and_looks_at_k_pixels() -> None:
    ks = [6, 16]
    result = training.train(data.load(2), ks, 150, "sigmoid", lambda: None)
    learned, *_, random = result.accuracy.mean(0)
    assert bool((learned > random).all())
    assert torch.equal(result.pixels.sum(-1), torch.tensor(ks).expand(2, len(training.METHODS), 2).float())
    assert set(result.pixels.unique().tolist()) == {0.0, 1.0}


def test_every_method_starts_from_the_same_network() -> None:
    networks = training.Networks.make(2, 5, 3, torch.Generator().manual_seed(0))
    for weight in networks.weights:
        assert torch.equal(weight, weight[:, :1].expand_as(weight))
