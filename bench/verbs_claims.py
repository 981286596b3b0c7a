"""What is claimed of each verb and method: the call, what it is measured against, on which shapes, and the bound."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, int, int]  # batch, n, k
Run = Callable[[Tensor], Any]
Make = Callable[[int, int, int], Run]

MASKS: tuple[Shape, ...] = ((4096, 64, 2), (64, 1024, 32), (16, 16384, 1024), (1, 10**6, 62500))
SIXTEENTH: tuple[Shape, ...] = ((4096, 64, 4), (64, 1024, 64), (16, 16384, 1024), (1, 10**6, 62500))
MANY: tuple[Shape, ...] = (*MASKS, (256, 32768, 2048))  # the last one is larger than the caches
ITEMS = 16  # features of an item that is gathered


@dataclass(frozen=True)
class Claim:
    what: str
    over: str
    call: Make
    base: Make
    bound: Callable[[Shape], float]
    shapes: tuple[Shape, ...] = MASKS
    mode: str = "forward"
    needs: str = ""  # a package

    def missing(self) -> str:
        return f"{self.needs} is not installed" if self.needs and importlib.util.find_spec(self.needs) is None else ""


def shape_name(shape: Shape) -> str:
    return "{}x{}, k={}".format(*shape)


def by_length(long: float, short: float) -> Callable[[Shape], float]:
    """One bound for rows of 10^4 scores and more, one for shorter ones."""
    return lambda shape: long if shape[1] >= 10**4 else short


def always(bound: float) -> Callable[[Shape], float]:
    return lambda shape: bound


def softmax(batch: int, n: int, k: int) -> Run:
    return lambda x: torch.softmax(x, -1)


def matrix_softmax(batch: int, n: int, k: int) -> Run:
    """One softmax of a (k, n) tensor for each row."""
    return lambda x: torch.softmax(x.unsqueeze(-2).expand(batch, k, n).contiguous(), -1)


def network_layers(n: int) -> int:
    """Of the bitonic network of ``n`` wires."""
    steps = (n - 1).bit_length()
    return steps * (steps + 1) // 2


def topk(batch: int, n: int, k: int) -> Run:
    return lambda x: torch.topk(x, k).values


def sort(batch: int, n: int, k: int) -> Run:
    return lambda x: torch.sort(x, -1).values


def topk_gather(batch: int, n: int, k: int) -> Run:
    items = torch.randn(batch, n, ITEMS)
    return lambda x: items.gather(-2, torch.topk(x, k).indices.unsqueeze(-1).expand(batch, k, ITEMS))


def topk_scatter(batch: int, n: int, k: int) -> Run:
    def run(x: Tensor) -> Tensor:
        found = torch.topk(x.abs(), k).indices
        return torch.zeros_like(x).scatter(-1, found, x.gather(-1, found))

    return run


def torchsort(verb: str, regularization: str) -> Make:
    def make(batch: int, n: int, k: int) -> Run:
        import torchsort as peer

        return lambda x: getattr(peer, verb)(x, regularization=regularization, regularization_strength=1.0)

    return make


def difftopk(kind: str) -> Make:
    def make(batch: int, n: int, k: int) -> Run:
        import difftopk as peer

        sorter = peer.SoftSort(tau=1.0) if kind == "softsort" else peer.NeuralSort(tau=1.0)
        return lambda x: sorter(x)[..., :k, :]

    return make


def ours(verb: str, **options: Any) -> Make:
    """``khot.<verb>(x, k, **options)``."""

    def make(batch: int, n: int, k: int) -> Run:
        import khot

        return lambda x: getattr(khot, verb)(x, k, **options)

    return make


def ranks(verb: str, regularization: str) -> Make:
    def make(batch: int, n: int, k: int) -> Run:
        import khot

        return lambda x: getattr(khot, verb)(x, regularization=regularization)

    return make


def gathered(verb: str) -> Make:
    def make(batch: int, n: int, k: int) -> Run:
        import khot

        items = torch.randn(batch, n, ITEMS)
        if verb == "gather_topk":
            return lambda x: khot.gather_topk(items, x, k).values
        return lambda x: khot.select_topk(items, x, k, method="sigmoid")

    return make


def _verbs() -> list[Claim]:
    both = ("forward", "forward+backward")
    fixed = {"design_options": {"order": "fixed"}}
    return [
        Claim("topk_mask", "softmax", ours("topk_mask"), softmax, by_length(2, 3)),
        Claim("topk_mask", "torch.topk", ours("topk_mask"), topk, always(0.3), SIXTEENTH),
        Claim("soft_topk(hard=True)", "softmax", ours("soft_topk", hard=True), softmax, by_length(3, 4)),
        Claim("soft_topk(hard=True)", "softmax", ours("soft_topk", hard=True), softmax, by_length(3, 3.5), mode=both[1]),
        Claim("gather_topk", "torch.topk + gather", gathered("gather_topk"), topk_gather, always(1.2)),
        Claim("select_topk(method='sigmoid')", "torch.topk + gather", gathered("select_topk"), topk_gather, always(1.2)),
        Claim("sample_topk", "softmax", ours("sample_topk"), softmax, lambda s: 8.0 if s[1] <= 10**5 else 10.0),
        Claim("sample_topk, fixed order", "softmax", ours("sample_topk", **fixed), softmax, always(4)),
        Claim("magnitude_topk", "torch.topk + scatter", ours("magnitude_topk"), topk_scatter, always(3), ((256, 512, 8),)),
        *(
            Claim(f"{verb}, {kind}", "torchsort", ranks(verb, kind), torchsort(verb, kind), lambda s: 0.6 if s[1] >= 1000 else 1.0,
                  ((256, 100, 0), (64, 1000, 0), (16, 10000, 0)), mode, "torchsort")
            for verb in ("soft_rank", "soft_sort") for kind in ("l2", "kl") for mode in both
        ),
    ]  # fmt: skip


def _methods() -> list[Claim]:
    masks = {
        "softrank": ({}, sort, always(1.0)), "softsort": ({}, sort, always(1.0)), "halving": ({}, sort, always(1.0)),
        "entmax": ({}, softmax, always(3)), "permutahedron": ({"p": 2.0}, softmax, always(5)),
        "scaled": ({}, softmax, always(4)), "threshold": ({}, softmax, always(4)),
    }  # fmt: skip
    over = {sort: "torch.sort", softmax: "softmax"}
    short: tuple[Shape, ...] = ((64, 1024, 32),)
    heavy: tuple[Shape, ...] = ((32, 10**4, 1000),)
    return [
        *(
            Claim(name, "softmax", ours("soft_topk", method=name), softmax, by_length(*bounds), MANY, mode)
            for name in ("sigmoid", "laplace", "euclidean") for mode, bounds in (("forward", (1.0, 1.2)), ("forward+backward", (1.2, 1.4)))
        ),
        *(
            Claim(f"mask of {name}", over[base], ours("soft_topk", method=name, **options), base, bound)
            for name, (options, base, bound) in masks.items()
        ),
        *(
            Claim(f"mask of entmax, alpha={alpha}", "softmax", ours("soft_topk", method="entmax", alpha=alpha), softmax, always(8))
            for alpha in (1.25, 1.75)
        ),
        *(
            Claim(f"matrix of {name}", "softmax of (k, n)", ours("soft_topk_matrix", method=name), matrix_softmax, always(4), short)
            for name in ("softsort", "neuralsort", "halving", "iterative")
        ),
        *(
            Claim(f"matrix of {name}", "softmax of (k, n)", ours("soft_topk_matrix", method=name), matrix_softmax, always(6), heavy,
                  "forward+backward")
            for name in ("softrank", "iterative", "sequential")
        ),
        # A network mixes the rows of its matrix once a layer, forward and back: a softmax each. One row of scores: a call takes seconds.
        Claim("matrix of network", "softmax of (k, n)", ours("soft_topk_matrix", method="network"), matrix_softmax,
              lambda s: float(network_layers(s[1])), ((1, 10**4, 1000),), "forward+backward"),
        *(
            Claim(f"matrix of {name}", "difftopk", ours("soft_topk_matrix", method=name), difftopk(name), always(0.5), short,
                  needs="difftopk")
            for name in ("softsort", "neuralsort")
        ),
    ]  # fmt: skip


CLAIMS = [*_verbs(), *_methods()]
