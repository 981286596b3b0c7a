"""What a language model loses when one layer's residual stream is replaced by a reconstruction of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LAYER, CONTEXT = 15, 128  # as in examples/sparse_autoencoder.py, which cuts the text into the same sequences


class Spliced:
    """SmolLM2-135M and some sequences of the text that no autoencoder was trained on."""

    def __init__(self, folder: Path, text: Path, first: int, count: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        name = next(folder.glob("*.gguf"), None)
        if name is None or not text.exists():
            raise SystemExit(f"loss recovered needs a .gguf file in {folder} and {text}; --splice 0 leaves it out")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name.name)
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name.name, dtype=torch.float32).eval()
        ids = torch.tensor(tokenizer(text.read_text(errors="replace"))["input_ids"])
        rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)[first:]
        self.mean: float | None = None
        self.rows = rows[torch.linspace(0, len(rows) - 1, count).long()]

    @torch.no_grad()
    def loss(self, change: Callable[[Tensor], Tensor]) -> float:
        """Nats a token with ``change`` applied to the layer's output, the first token of a sequence left alone."""

        def swap(module: Any, inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            new = torch.cat([hidden[:, :1], change(hidden[:, 1:])], dim=1)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        handle = self.model.model.layers[LAYER].register_forward_hook(swap)
        try:
            parts = [(self.model(part).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten()) for part in self.rows.split(4)]
        finally:
            handle.remove()
        return float(torch.cat([F.cross_entropy(logits, target, reduction="none") for logits, target in parts]).mean())

    @functools.cached_property
    def plain(self) -> float:
        return self.loss(lambda hidden: hidden)

    @functools.cached_property
    def zero(self) -> float:
        return self.loss(torch.zeros_like)

    def _of_mean(self, average: Tensor) -> float:
        """Once for all autoencoders: they are trained on the same tokens."""
        if self.mean is None:
            self.mean = self.loss(lambda hidden: average.expand_as(hidden))
        return self.mean

    def recovered(self, change: Callable[[Tensor], Tensor], average: Tensor) -> dict[str, float]:
        """The share of the loss of removing the layer's output that the reconstruction wins back: against zero and against the mean."""
        loss, mean = self.loss(change), self._of_mean(average)
        against = {"recovered": self.zero, "recovered_mean": mean}
        return {"ce": loss, "ce_plain": self.plain, **{name: (worst - loss) / (worst - self.plain) for name, worst in against.items()}}
