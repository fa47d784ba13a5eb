"""The training script of bench/elastic.py with DDP and a checkpoint, for torchrun's elastic restart."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch
from elastic_model import BATCH, Rows, StepLog, build, loss_of, optimizer_for

CHECKPOINT_EVERY = 20


def main() -> None:
    size, path = os.environ["MODEL"], os.environ["CHECKPOINT"]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(size)
    optimizer = optimizer_for(model)
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    data = Rows(size)
    log = StepLog(f"t{rank}")
    local = max(1, BATCH[size] // world)
    while True:
        first = (step * BATCH[size] + rank * local) % (len(data) - local)
        optimizer.zero_grad()
        loss_of(ddp, data.x[first : first + local]).backward()
        optimizer.step()
        step += 1
        log.step(step, world)
        if step % CHECKPOINT_EVERY == 0 and rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                path + ".part",
            )
            os.replace(path + ".part", path)


main()
