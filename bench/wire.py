"""What a sharded call costs on many devices: a formula, and a simulation of every message that checks it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from khot.loss import threshold_family
from khot.primitives.threshold.rows import Rows, wide_sum
from khot.primitives.threshold.solve import solve_rows


@dataclass(frozen=True)
class Network:
    """A stated machine: ``devices`` that exchange messages, each taking ``latency + bytes / bandwidth``, and read their own memory."""

    devices: int
    latency: float = 10e-6  # seconds a message
    bandwidth: float = 10e9  # bytes per second between two devices
    memory: float = 1e12  # bytes per second that a device reads of its own scores
    jitter: float = 0.0  # share by which a pass may take longer, at random for each device and pass


@dataclass(frozen=True)
class Call:
    """One forward call: rounds with a pass over the shard and an all-reduce each, behind one all-gather of a header."""

    items: int  # of the whole row
    rounds: int
    sent: int  # bytes per all-reduce
    header: int = 80
    item_bytes: int = 4


def rounds_of(method: str = "sigmoid", *, items: int = 64_000, share: float = 0.01, rows: int = 1) -> Call:
    """Count the rounds of the search on normal scores, with the reductions of a sharded row. They do not depend on the length."""
    seen: list[int] = []

    def across(*columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(8 * rows * len(columns))
        return columns

    spread = Rows(sums=lambda *values: across(*(wide_sum(value) for value in values)), places=2, length=items, across=across)
    x = torch.randn(rows, items, generator=torch.Generator().manual_seed(0))
    solve_rows(x, items * share, 1.0, threshold_family(method, {}), spread)
    return Call(items, len(seen), max(seen))


def predict(network: Network, call: Call) -> float:
    """Seconds: latency x log2(devices) for every collective, O(rows) bytes, and the passes over a shard."""
    hops = math.ceil(math.log2(network.devices)) if network.devices > 1 else 0
    # A message of an all-gather doubles with every hop, that of an all-reduce does not.
    gather = hops * network.latency + call.header * (network.devices - 1) / network.bandwidth
    reduce = hops * (network.latency + call.sent / network.bandwidth)
    return gather + call.rounds * (reduce + scan(network, call))


def scan(network: Network, call: Call) -> float:
    """Seconds of one pass over a shard."""
    return -(-call.items // network.devices) * call.item_bytes / network.memory


def simulate(network: Network, call: Call, seed: int = 0) -> float:
    """Seconds until the last device is done, message by message: every device has a clock of its own and waits for its partners."""
    chance, clocks = random.Random(seed), [0.0] * network.devices
    clocks = _recursive_doubling(network, clocks, lambda hop: call.header << hop)
    for _ in range(call.rounds):
        clocks = [clock + scan(network, call) * (1 + network.jitter * chance.random()) for clock in clocks]
        clocks = _recursive_doubling(network, clocks, lambda hop: call.sent)
    return max(clocks)


def _recursive_doubling(network: Network, clocks: list[float], size: Callable[[int], int]) -> list[float]:
    """In hop ``h`` device ``i`` exchanges with device ``i xor 2^h``; a power of two of devices."""
    if network.devices & (network.devices - 1):
        raise ValueError(f"devices must be a power of two here, got {network.devices}")
    for hop in range(network.devices.bit_length() - 1):
        took = network.latency + size(hop) / network.bandwidth
        clocks = [max(clocks[i], clocks[i ^ (1 << hop)]) + took for i in range(network.devices)]
    return clocks
