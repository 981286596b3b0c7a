"""What the selection costs in a training step: autoencoder, routing and sparse network, each in turns with what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.applications.cells import options, run
from bench.applications.sparse import EVERY
from bench.common import Table, print_tables, race
from khot.nn import Routing, SparseAutoencoder, TopKRouter, sparsify
from khot.nn.routing import count

Call = Callable[[], object]
D_IN, D_SAE, K, BATCH = 576, 4608, 32, 1024
TOKENS, EXPERTS, ACTIVE = 4096, 64, 2
BOUNDS = {"autoencoder": 1.1, "autoencoder, relaxed": 1.1, "routing, training": 1.3, "routing, evaluation": 1.3,
          "sparse network": 1 / 0.7, "sparse network, every step": 1 / 0.7}  # fmt: skip


def main(argv: list[str]) -> int:
    given = options("steps", __doc__).parse_args(argv)
    cells = [{"what": name} for name in BOUNDS]
    work: Callable[..., dict[str, Any]] = lambda what: _cell(what, quick=given.quick)  # noqa: E731
    print_tables(tables(run("steps", given, cells, work)))
    return 0


def _cell(what: str, *, quick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    base, ours = MAKERS[what]()
    length = {"seconds": 0.05, "rounds": (2, 3), "patience": 0.1} if quick else {"seconds": 8.0, "rounds": (10, 100), "patience": 60.0}
    times = race({"base": base, "ours": ours}, **length)  # pyright: ignore[reportArgumentType]
    ratio = times["ours"].ratio(times["base"])
    return {"base_ms": 1e3 * times["base"].median, "ours_ms": 1e3 * times["ours"].median, "ratio": ratio, "bound": BOUNDS[what]}


def _autoencoder(**choices: Any) -> Callable[[], tuple[Call, Call]]:
    """A step of Adam on 1,024 tokens: the layer's loss, and the same written out with ``torch.topk``."""

    def make() -> tuple[Call, Call]:
        x = torch.randn(BATCH, D_IN)
        sae, plain = SparseAutoencoder(D_IN, D_SAE, K, **choices), SparseAutoencoder(D_IN, D_SAE, K)
        return _stepper(plain, lambda: _plain_loss(plain, x)), _stepper(sae, lambda: sae.loss(x))

    return make


def _plain_loss(sae: SparseAutoencoder, x: Tensor) -> Tensor:
    best = ((x - sae.b_dec) @ sae.W_enc + sae.b_enc).topk(sae.k)  # pyright: ignore[reportArgumentType]
    latents = x.new_zeros(len(x), sae.d_sae).scatter(-1, best.indices, best.values.relu())
    recon = latents @ F.normalize(sae.W_dec, dim=-1) + sae.b_dec
    return (x - recon).square().sum() / (x - x.mean(0)).square().sum()


def _stepper(model: nn.Module, loss: Callable[[], Tensor], kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> Call:
    optimizer = kind(model.parameters(), lr=1e-4)  # pyright: ignore[reportCallIssue]

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _routing(*, training: bool) -> tuple[Call, Call]:
    """Logits to weights and the order of the tokens by expert; in training with the gradient of the logits."""
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=training)
    router = TopKRouter(EXPERTS, EXPERTS, ACTIVE).train(training)
    grad = torch.randn(TOKENS, ACTIVE)

    def softmax() -> Routing:
        best = logits.softmax(-1).topk(ACTIVE)
        return Routing(logits, best.values / best.values.sum(-1, keepdim=True), best.indices, logits)

    def call(route: Callable[[], Routing]) -> object:
        routing = route()
        order = routing.indices.flatten().argsort(stable=True)
        ends = count(routing.indices.flatten()[order], EXPERTS).cumsum(0)
        return torch.autograd.grad(routing.weights, logits, grad) if training else (order, ends)

    return lambda: call(softmax), lambda: call(lambda: router._by_token(logits, logits, None))


def _sparse(every: int) -> tuple[Call, Call]:
    """Steps of LeNet-300-100 on 100 images: dense, and with a soft mask over all weights on the way down."""
    x, y = torch.randn(100, 784), torch.randint(10, (100,))
    models = [nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)) for _ in range(2)]
    sparsify(models[1], 0.02, every=every).anneal(1 / 3)

    def stepper(model: nn.Module) -> Call:
        step = _stepper(model, lambda: F.cross_entropy(model(x), y), torch.optim.SGD)
        return lambda: [step() for _ in range(EVERY)]  # as many as share a mask

    return stepper(models[0]), stepper(models[1])


MAKERS: dict[str, Callable[[], tuple[Call, Call]]] = {
    "autoencoder": _autoencoder(),
    "autoencoder, relaxed": _autoencoder(method="sigmoid"),
    "routing, training": lambda: _routing(training=True),
    "routing, evaluation": lambda: _routing(training=False),
    "sparse network": lambda: _sparse(EVERY),
    "sparse network, every step": lambda: _sparse(1),
}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    head = ["step", "ms", "ms of what it replaces", "ratio", "bound"]
    body = [[r["what"], f"{r['ours_ms']:.2f}", f"{r['base_ms']:.2f}", f"{r['ratio']:.2f}", f"<= {r['bound']:.2f}"] for r in rows]
    note = (
        f"Medians in turns, {rows[-1]['threads'] if rows else 1} thread. Autoencoder: a step of Adam, d_in {D_IN}, d_sae {D_SAE}, k {K}, "
        f"batch {BATCH}, over torch.topk. Routing: {TOKENS} tokens, {EXPERTS} experts, k = {ACTIVE}, from the logits to the order by "
        f"expert, over softmax and torch.topk. Sparse network: {EVERY} steps of LeNet-300-100 over dense ones; 1.43 is a mask of 30 %."
    )
    return [Table("what the selection costs in a training step", head, body, note)]
