"""Images per second of a ViT that drops tokens, beside what its MACs promise; the weights are random, which speed does not see."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import khot
from bench.common import RESULTS, Recorder, Table, parser, print_tables, race
from khot.models import ViT, count_macs
from khot.train.batches import Batches
from khot.train.sources import Memory

KEEPS = (1.0, 0.9, 0.7, 0.5, 0.25)
CHOICES: dict[str, dict[str, Any]] = {"fused token": {"fuse": True}, "received": {"score": "received"}, "learned": {"score": "learned"}}
LEAST = 5  # rounds; what had fewer is in the records and in no table
Row = dict[str, Any]


class Encoder(NamedTuple):
    """A model to be timed."""

    title: str
    options: dict[str, Any]  # of khot.models.ViT
    at: tuple[int, ...]  # blocks that drop tokens


ENCODERS = (
    Encoder("tiny, 32 x 32", {"image_size": 32, "patch_size": 4, "dim": 96, "depth": 6, "num_heads": 3, "num_classes": 10}, (1, 3, 4)),
    Encoder("DeiT-Ti, 224 x 224", {}, (3, 6, 9)),
)


def main(argv: list[str]) -> int:
    options = parser("vision throughput", __doc__)
    options.add_argument("--seconds", type=float, default=2.5, help="for each setting, after five rounds of all")
    options.add_argument("--only", nargs="+", choices=list(pieces(ENCODERS, 0.0)), help="these pieces alone; with --append in several runs")
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    default = RESULTS / "vision" / ("throughput-quick.jsonl" if given.quick else "throughput.jsonl")
    record = Recorder("vision throughput", given.out or default, append=given.append)
    for row in measure(ENCODERS[:1] if given.quick else ENCODERS, given.seconds / 10 if given.quick else given.seconds, given.only):
        record.add(**row)
    print_tables(tables(record.rows))
    return 0


def measure(encoders: tuple[Encoder, ...], seconds: float, only: Sequence[str] | None = None) -> Iterator[Row]:
    """All pieces, or those that are named."""
    for name, piece in pieces(encoders, seconds).items():
        if only is None or name in only:
            yield from piece()


def pieces(encoders: tuple[Encoder, ...], seconds: float) -> dict[str, Callable[[], Iterator[Row]]]:
    """What can be measured by itself, by name: a whole run takes longer than a machine is quiet."""
    rates = {
        f"{encoder.title.split(',')[0].lower()}-{batch}": functools.partial(_rates, encoder, batch, seconds)
        for encoder in encoders
        for batch in (1, 64)
    }
    others = {"scores": _choices, "end-to-end": _end_to_end, "training": _training}
    return rates | {name: functools.partial(piece, encoders[0], seconds) for name, piece in others.items()}


def _rates(encoder: Encoder, batch: int, seconds: float) -> Iterator[Row]:
    """Every keep rate by the class token's attention, in turns with the model as it was."""
    model = ViT(**encoder.options).eval()
    images = _images(model, batch)
    models = {keep: khot.reduce_tokens(copy.deepcopy(model), keep, at=encoder.at) for keep in KEEPS}
    yield from _race(encoder, "model alone", batch, model, models, lambda each: lambda: each(images), seconds)
    with torch.inference_mode():
        equal = torch.equal(models[1.0](images), model(images))
    yield {"what": "keep 1 is bit-identical", "model": encoder.title, "batch": batch, "holds": equal}


def _choices(encoder: Encoder, seconds: float) -> Iterator[Row]:
    """The other scores at keep .5."""
    model = ViT(**encoder.options).eval()
    images = _images(model, 64)
    models = {name: khot.reduce_tokens(copy.deepcopy(model), 0.5, at=encoder.at, **options) for name, options in CHOICES.items()}
    for row in _race(encoder, "score", 64, model, models, lambda each: lambda: each(images), seconds / 2):
        yield row | {"choice": row["keep"], "keep": 0.5}


def _end_to_end(encoder: Encoder, seconds: float) -> Iterator[Row]:
    """With what comes before the model: bytes to normalised images, as `khot eval` reads them."""
    model = ViT(**encoder.options).eval()
    pixels = torch.randint(0, 256, (64, 3, encoder.options["image_size"], encoder.options["image_size"]), dtype=torch.uint8)
    source = Memory(pixels, torch.zeros(64, dtype=torch.long), 10, torch.full((3,), 0.5), torch.full((3,), 0.25))
    data, places = Batches(source, seed=0, augment=False), torch.arange(64)
    models = {keep: khot.reduce_tokens(copy.deepcopy(model), keep, at=encoder.at) for keep in KEEPS[1:]}
    yield from _race(encoder, "end to end", 64, model, models, lambda each: lambda: each(data[0, places].images), seconds / 2)


def _training(encoder: Encoder, seconds: float) -> Iterator[Row]:
    """Forward and backward at keep .5: tokens are dropped while training too."""
    model = ViT(**encoder.options)
    images, labels = _images(model, 64), torch.randint(10, (64,))
    hows: dict[str, dict[str, Any]] = {"cls": {}, "learned, sample": {"score": "learned", "gradient": "sample"}}
    models = {name: khot.reduce_tokens(copy.deepcopy(model), 0.5, at=encoder.at, **how) for name, how in hows.items()}

    def step(each: nn.Module) -> Callable[[], None]:
        return lambda: F.cross_entropy(each(images), labels % encoder.options["num_classes"]).backward()

    for row in _race(encoder, "training", 64, model, models, step, seconds / 2, inference=False):
        yield row | {"choice": row["keep"], "keep": 0.5}


def _race(
    encoder: Encoder,
    what: str,
    batch: int,
    model: ViT,
    models: Mapping[Any, nn.Module],
    call: Callable[[nn.Module], Any],
    seconds: float,
    *,
    inference: bool = True,
) -> Iterator[Row]:
    shape = (1, 3, encoder.options.get("image_size", 224), encoder.options.get("image_size", 224))
    with torch.inference_mode(inference):
        times = race(
            {"base": call(model), **{name: call(each) for name, each in models.items()}}, seconds=seconds, patience=max(0.5, 4 * seconds)
        )
    base = count_macs(model, *shape)
    for name, each in models.items():
        speedup, macs = 1 / times[name].ratio(times["base"]), count_macs(each, *shape)
        ratio = base / macs
        rates = {"images_per_second": batch / times[name].median, "base_images_per_second": batch / times["base"].median}
        row = {"what": what, "model": encoder.title, "batch": batch, "keep": name, "speedup": speedup, "macs": macs, "mac_ratio": ratio}
        yield row | {"share": speedup / ratio, **rates, **times[name].row()}


def _images(model: ViT, batch: int) -> Tensor:
    side = model.patch_embed.image_size
    return torch.randn(batch, 3, side, side)


def tables(rows: list[Row]) -> list[Table]:
    out = []
    for what, batch in (("model alone", 64), ("model alone", 1), ("score", 64), ("end to end", 64), ("training", 64)):
        found = [row for row in rows if (row["what"], row.get("batch")) == (what, batch) and row["rounds"] >= LEAST]
        lines = [
            [row["model"], row.get("choice", "cls"), row["keep"], f"{row['speedup']:.2f}", f"{row['mac_ratio']:.2f}", f"{row['share']:.2f}"]
            + [f"{row['images_per_second']:.0f}", f"{row['base_images_per_second']:.0f}"]
            for row in found
        ]
        head = ["model", "score", "keep", "times as fast", "MACs /", "share of it", "images/s", "base images/s"]
        out.append(Table(f"{what}, batch {batch}, one thread", head, lines))
    return out
