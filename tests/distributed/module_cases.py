"""Experts over ranks, and layers and models under DDP and FSDP2, beside one process that has everything."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import khot
from khot.nn import MoE, StackedFeedForward, TopKRouter
from tests.distributed.table import bounds, case, close, rand, refused

NUM_EXPERTS, DIM = 4, 6


def experts(stacked: bool) -> nn.Module:
    torch.manual_seed(3)
    if stacked:
        return StackedFeedForward(NUM_EXPERTS, DIM, 5).double()
    return nn.ModuleList(nn.Linear(DIM, 3) for _ in range(NUM_EXPERTS)).double()


def some_of(whole: nn.Module, rank: int, world: int) -> nn.Module:
    """The experts of one rank."""
    each = NUM_EXPERTS // world
    mine = slice(rank * each, (rank + 1) * each)
    if isinstance(whole, nn.ModuleList):
        return nn.ModuleList(copy.deepcopy(one) for one in list(whole)[mine])
    part = StackedFeedForward(each, DIM, 5).double()
    part.load_state_dict({name: value[mine] for name, value in whole.state_dict().items()})
    return part


def summed(value: Tensor | None) -> Tensor:
    assert value is not None
    out = value.clone()
    dist.all_reduce(out)
    return out


@case(2, 4)
def experts_over_ranks(rank: int, world: int) -> None:
    x, weight = rand(13, DIM), rand(13, DIM, seed=1)
    at = bounds(13, rank, world, "uneven")  # one rank has no token
    settings: tuple[tuple[bool, float | None, dict[str, Any]], ...] = (
        (True, None, {}),
        (False, None, {"hard": False}),
        (False, 0.7, {"bias": True}),
    )
    for stacked, capacity, options in settings[: 3 if world == 2 else 2]:
        torch.manual_seed(1)
        router = TopKRouter(DIM, NUM_EXPERTS, 2, **options).double()
        other = copy.deepcopy(router)
        one = MoE(router, experts(stacked), capacity=capacity)
        mine = MoE(other, some_of(one.experts, rank, world), capacity=capacity, group=dist.group.WORLD)
        whole, part = x.clone().requires_grad_(), x[at].clone().requires_grad_()
        expected, routing = one(whole)
        (expected * weight[..., : expected.shape[-1]]).sum().backward()
        found, here = mine(part)
        (found * weight[at, : found.shape[-1]]).sum().backward()
        close(found.detach(), expected.detach()[at], 16)
        close(here.weights.detach(), routing.weights.detach()[at], 16)
        close(part.grad, whole.grad[at], 64)
        close(summed(other.weight.grad), router.weight.grad, 64)
        held = some_of(_gradients(one.experts), rank, world)
        for got, want in zip(mine.experts.parameters(), held.parameters(), strict=True):
            close(torch.zeros_like(got) if got.grad is None else got.grad, want.detach(), 64)
        for module in (one, mine):
            module.eval()
        close(mine(x[at]).values.detach(), one(x).values.detach()[at], 16)
    _misplaced(world)


def _gradients(module: nn.Module) -> nn.Module:
    """The module with its gradients in place of its weights."""
    out = copy.deepcopy(module)
    for to, value in zip(out.parameters(), module.parameters(), strict=True):
        to.data = torch.zeros_like(value) if value.grad is None else value.grad.clone()
    return out


def _misplaced(world: int) -> None:
    everybody: Any = dist.group.WORLD
    refused(ValueError, f"one expert for each of the router's 4, got 4 and {world} ranks",
            lambda: MoE(TopKRouter(DIM, 4, 2), experts(False), group=everybody))  # fmt: skip
    refused(ValueError, "choose among all of them",
            lambda: MoE(TopKRouter(DIM, 4, 2, choice="expert"), some_of(experts(False), 0, world), group=everybody))  # fmt: skip


def modules() -> dict[str, tuple[nn.Module, Tensor]]:
    """Layers and models whose items do not look at each other, so that a mean over ranks is the mean over the batch; with inputs."""
    torch.manual_seed(0)
    size = {"preset": "tiny", "image_size": 8, "dim": 16, "depth": 1}
    return {
        "layers": (
            nn.Sequential(khot.nn.FeatureSelector(12, 5), khot.nn.SparseLinear(12, 8, 0.5), nn.ReLU(), nn.Linear(8, 2)),
            torch.randn(8, 12),
        ),
        "model": (khot.models.create_model("topk_dynamic", **size, k=4), torch.randn(8, 1, 8, 8)),
        "mixture": (_Values(MoE(TopKRouter(12, 4, 2, method="sigmoid").eval(), StackedFeedForward(4, 12, 8))), torch.randn(8, 12)),
    }  # fmt: skip


class _Values(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).values


def steps(model: nn.Module, wrapped: nn.Module, x: Tensor, number: int = 3) -> list[Tensor]:
    """The whole parameters after a few steps of gradient descent on the mean over the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(number):
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.detach() for value in model.parameters()]  # pyright: ignore[reportCallIssue]


@case(2, since=(2, 7))  # before, fully_shard does not run on CPUs
def data_parallel(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    for name, (model, x) in modules().items():
        part = x[rank::world]
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.eval()  # in training the temperature looks at the spread of the batch
        one, ddp, fsdp = model, copy.deepcopy(model), copy.deepcopy(model)
        before = [value.detach().clone() for value in one.parameters()]
        expected = steps(one, one, x)
        assert any(not torch.equal(value, old) for value, old in zip(expected, before, strict=True))
        wrapped = {"ddp": (ddp, nn.parallel.DistributedDataParallel(ddp)), "fsdp": (fsdp, fully_shard(fsdp))}
        for kind, (inner, outer) in wrapped.items():
            for got, want in zip(steps(inner, outer, part), expected, strict=True):
                torch.testing.assert_close(
                    got, want, rtol=1e-5, atol=1e-6, msg=lambda text, kind=kind, name=name: f"{name}, {kind}: {text}"
                )
