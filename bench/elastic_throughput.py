"""Two workers, one model twice: synchronised by Shoal and by plain DDP, in alternating blocks of the same processes.

Alternating cancels what else the machine does. Prints one JSON line from rank 0.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shoal.torch as shoal
from elastic_model import BATCH, Rows, build, loss_of, optimizer_for

BLOCK = 10


def main() -> None:
    size, blocks = os.environ["MODEL"], int(os.environ["BLOCKS"])
    job = shoal.init()
    model = build(size)
    model, optimizer = job.wrap(model, optimizer_for(model))
    loader = job.loader(Rows(size), batch_size=BATCH[size])
    plain = build(size)
    plain_optimizer = optimizer_for(plain)
    ddp = None
    times: dict[str, list[float]] = {"shoal": [], "ddp": []}
    flags: list[float] = []
    done = 0
    for _ in job.epochs(10**6):
        for x in loader:
            if ddp is None:
                store = dist.FileStore(os.environ["STEP_LOG"] + "/store", 2)
                dist.init_process_group("gloo", store=store, rank=job.rank, world_size=2)
                ddp = DistributedDataParallel(plain)
            if done % BLOCK == 0:
                for index in range(BLOCK):
                    began_s = time.perf_counter()
                    plain_optimizer.zero_grad()
                    loss_of(ddp, x).backward()
                    plain_optimizer.step()
                    if index > 0:
                        times["ddp"].append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            if done % BLOCK > 0:
                times["shoal"].append(time.perf_counter() - began_s)
            done += 1
            if done == BLOCK * blocks:
                break
        if done == BLOCK * blocks:
            break
    # The vote on its own, as it is at the end of each step.
    for _ in range(200):
        began_s = time.perf_counter()
        job._cast_vote()
        flags.append(time.perf_counter() - began_s)
    if job.rank == 0:
        result = {k: statistics.median(v) * 1e3 for k, v in times.items()}
        Path(os.environ["STEP_LOG"], "result.json").write_text(
            json.dumps({
                "shoal_step_ms": round(result["shoal"], 3),
                "ddp_step_ms": round(result["ddp"], 3),
                "throughput_vs_ddp": round(result["ddp"] / result["shoal"], 4),
                "steps_each": len(times["shoal"]),
                "vote_ms_per_step": round(statistics.median(flags) * 1e3, 4),
            })
        )  # fmt: skip
    dist.barrier()


main()
