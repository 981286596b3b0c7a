"""Sharded soft top-k: overhead on one process, bytes on the wire, weak scaling at 1 and 2 processes, and 64 simulated devices."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from bench.common import NATIVE, THRESHOLD, Table, chosen, draw_scores, green, parser, print_tables, race, recorder, same
from bench.timing import gradient_of
from bench.wire import Network, predict, rounds_of, simulate

LIMIT = 1.2  # times the plain call, for the sharded one on one process at 10^6
SHARE = 0.01
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    options = parser("distributed", __doc__)
    options.add_argument("--items", type=int, help="of a row in every process (10^6; 10^5 with --quick)")
    given = options.parse_args(argv)
    items = given.items or (10**5 if given.quick else 10**6)
    record = recorder("distributed", given)
    methods = green(chosen(given.methods, THRESHOLD), record)
    for world in (1, 2):
        for row in _start(world, items, methods, rounds=3 if given.quick else 15):
            record.add(**row)
    for row in model(methods):
        record.add(**row)
    print_tables(tables(record.rows))
    return 0


def _start(world: int, items: int, methods: list[str], rounds: int) -> list[Row]:
    """What the first of ``world`` processes measures."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_work, args=(world, folder, items, methods, rounds), nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
        return json.loads(Path(folder, "rows").read_text())


def _work(rank: int, world: int, folder: str, items: int, methods: list[str], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    rows = [row for method in methods for row in _measure(method, items, world, rank, rounds)]
    if world == 1:
        rows += [row for method in methods if method in NATIVE for row in _overhead(method, items)]
    if not rank:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _overhead(method: str, items: int) -> list[Row]:
    """The sharded call beside the plain one, in turns, in one process."""
    import khot.distributed

    x, k = draw_scores("normal", (items,)), items * SHARE
    plain, sharded = (functools.partial(call, k=k, method=method) for call in (khot.soft_topk, khot.distributed.soft_topk))
    out = []
    for part, calls in {
        "forward": {"plain": lambda: plain(x), "sharded": lambda: sharded(x)},
        "forward and backward": {"plain": gradient_of(plain, x), "sharded": gradient_of(sharded, x)},
    }.items():
        times = race(calls)
        ratio = times["sharded"].ratio(times["plain"])
        out.append({"what": "overhead", "method": method, "part": part, "n": items, "ratio": ratio, **times["sharded"].row()})
    return out


def _measure(method: str, items: int, world: int, rank: int, rounds: int) -> list[Row]:
    """Traffic of one call at two lengths, and the time of forward and backward, the slowest process counting."""
    import khot.distributed

    out = []
    for n in (items // 10, items):
        x = draw_scores("normal", (n,), seed=rank).requires_grad_()
        k = n * world * SHARE
        call = functools.partial(khot.distributed.soft_topk, x, k, method=method)
        with khot.distributed.traffic() as ahead:
            y = call()
        with khot.distributed.traffic() as back:
            y.sum().backward()
        row = {"what": "call", "method": method, "processes": world, "n_local": n, "bytes": ahead.bytes, "bytes_backward": back.bytes}
        row |= {"all_reduces": ahead.calls.get("all_reduce", 0), "all_reduces_backward": back.calls.get("all_reduce", 0)}
        out.append(row | _times(lambda: call().sum().backward(), rounds))  # noqa: B023, called at once
    return out


def _times(call: Any, rounds: int) -> Row:
    import khot.distributed

    whole, waiting = [], []
    for _ in range(rounds + 1):
        dist.barrier()
        with khot.distributed.traffic() as seen:
            began = time.perf_counter()
            call()
            took = torch.tensor([time.perf_counter() - began, seen.seconds], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        whole.append(float(took[0]))
        waiting.append(float(took[1]))
    return {"seconds": statistics.median(whole[1:]), "seconds_communicating": statistics.median(waiting[1:]), "rounds": rounds}


def model(methods: list[str]) -> list[Row]:
    """10^9 items on 64 devices with stated latency and bandwidth, by the formula and by the simulation."""
    out = []
    for method in methods:
        call = replace(rounds_of(method), items=10**9)
        for devices in (1, 8, 64):
            even, uneven = Network(devices), Network(devices, jitter=0.2)
            row = {"what": "model", "method": method, "devices": devices, "items": call.items, "all_reduces": call.rounds}
            row |= {"predicted": predict(even, call), "simulated": simulate(even, call), "simulated_jitter": simulate(uneven, call)}
            out.append(row | {"latency": even.latency, "bandwidth": even.bandwidth, "memory": even.memory})
    return out


def tables(rows: list[Row]) -> list[Table]:
    def ms(value: float) -> str:
        return f"{value * 1e3:.3g}"

    overhead = [[r["method"], r["part"], f"{r['ratio']:.2f}", f"{LIMIT}"] for r in rows if same(r, what="overhead")]
    calls = [r for r in rows if same(r, what="call")]
    alone = {(r["method"], r["n_local"]): r["seconds"] for r in calls if r["processes"] == 1}
    wire = [
        [r["method"], str(r["processes"]), f"{r['n_local']:,}", str(r["all_reduces"]), str(r["all_reduces_backward"])]
        + [str(r["bytes"]), str(r["bytes_backward"]), ms(r["seconds"]), ms(r["seconds_communicating"])]
        + [f"{alone[r['method'], r['n_local']] / r['seconds']:.2f}" if (r["method"], r["n_local"]) in alone else ""]
        for r in calls
    ]
    model = [
        [r["method"], str(r["devices"]), str(r["all_reduces"]), ms(r["predicted"]), ms(r["simulated"]), ms(r["simulated_jitter"])]
        for r in rows
        if same(r, what="model")
    ]
    return [
        Table("sharded over plain, one process", ["method", "part", "ratio", "at most"], overhead),
        Table(
            "one row, forward and backward; weak scaling is the time of one process over that of all",
            ["method", "processes", "items each", "all-reduces", "backward", "bytes", "backward", "ms", "ms waiting", "weak scaling"],
            wire,
        ),
        Table("a forward call on 10^9 items, ms", ["method", "devices", "all-reduces", "formula", "simulated", "20 % jitter"], model),
    ]
