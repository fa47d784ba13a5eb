"""Workers that train one model twice: sharded by Shoal and by plain FSDP2, in alternating steps of the same processes.

As bench/elastic_throughput.py does it with DDP. Rank 0 writes one JSON document. SHARD is `set` or `groups`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import shoal.torch as shoal
import torch
from elastic_model import BATCH, Rows, build, loss_of, optimizer_for, shard
from elastic_timing import timed_s, train
from torch import nn


def plain_model(size: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded over two processes by torch alone, in a process group of its own."""
    store = dist.FileStore(os.environ["STEP_LOG"] + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = build(size)
    optimizer = optimizer_for(model)
    shard(model, optimizer, init_device_mesh("cpu", (2,)))
    loss_of(model, torch.zeros(1, next(iter(model)).in_features)).backward()
    optimizer.zero_grad()
    c10d._update_default_pg(None)  # Shoal refuses a process that has another default group
    return model, optimizer


def main() -> None:
    size, steps = os.environ["MODEL"], int(os.environ["STEPS"])
    data = Rows(size)
    job = shoal.init()
    plain, plain_optimizer = plain_model(size, int(os.environ["SHOAL_WORKER"][1:]))
    model = build(size)
    optimizer = optimizer_for(model)
    group = 2 if os.environ["SHARD"] == "groups" else None
    job.shard(model, optimizer, layers=nn.Linear, group=group)
    loader = job.loader(data, batch_size=BATCH[size])
    ours = (x for _ in job.epochs(10**6) for x in loader)
    train(model, optimizer, ours)  # joined from here on
    batches = torch.utils.data.DataLoader(data, batch_size=BATCH[size] // 2, shuffle=True, drop_last=True)
    theirs = (x for _ in itertools.count() for x in batches)
    times: dict[str, list[float]] = {"shoal": [], "fsdp2": []}
    runs = {
        "shoal": lambda: train(model, optimizer, ours),
        "fsdp2": lambda: train(plain, plain_optimizer, theirs),
    }
    for step in range(steps):
        for name in ("shoal", "fsdp2") if step % 2 else ("fsdp2", "shoal"):
            times[name].append(timed_s(runs[name]))
    if job.rank == 0:
        warm = {name: taken[5:] for name, taken in times.items()}
        shoal_s, fsdp2_s = statistics.median(warm["shoal"]), statistics.median(warm["fsdp2"])
        result = {
            "shoal_step_ms": round(shoal_s * 1e3, 3),
            "fsdp2_step_ms": round(fsdp2_s * 1e3, 3),
            "throughput_vs_fsdp2": round(fsdp2_s / shoal_s, 4),
            "throughput_vs_fsdp2_of_totals": round(sum(warm["fsdp2"]) / sum(warm["shoal"]), 4),
            "steps_each": len(warm["shoal"]),
        }
        Path(os.environ["STEP_LOG"], "result.json").write_text(json.dumps(result))


main()
