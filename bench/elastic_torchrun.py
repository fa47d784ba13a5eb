"""The training script of bench/elastic.py with DDP and a checkpoint, for torchrun's elastic restart.

With SHARD, the model is sharded by plain FSDP2, and each worker writes its part of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch
from elastic_model import BATCH, Rows, StepLog, build, loss_of, optimizer_for, shard
from torch import nn

CHECKPOINT_EVERY = 20
Ready = tuple[nn.Module, int, Callable[[int], None]]
"""(model, steps done, save a checkpoint)."""


def main() -> None:
    size, path = os.environ["MODEL"], os.environ["CHECKPOINT"]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(size)
    optimizer = optimizer_for(model)
    if os.environ.get("SHARD"):
        ddp, step, save = sharded(model, optimizer, path)
    else:
        ddp, step, save = replicated(model, optimizer, path)
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
        if step % CHECKPOINT_EVERY == 0:
            save(step)


def replicated(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> Ready:
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path + ".part")
            os.replace(path + ".part", path)

    return DistributedDataParallel(model), step, save


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> Ready:
    """torch's distributed checkpoints read what another number of workers wrote. A link names the last whole one."""
    shard(model, optimizer, init_device_mesh("cpu", (dist.get_world_size(),)))
    step = 0
    if os.path.exists(path):
        parts, optimizer_parts = get_state_dict(model, optimizer)
        whole = {"model": parts, "optimizer": optimizer_parts, "step": step}
        checkpoint.load(whole, checkpoint_id=os.path.realpath(path))
        set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
        step = int(whole["step"])

    def save(step: int) -> None:
        parts, optimizer_parts = get_state_dict(model, optimizer)
        target = f"{path}.{step}"
        checkpoint.save({"model": parts, "optimizer": optimizer_parts, "step": step}, checkpoint_id=target)
        if dist.get_rank() == 0:
            os.symlink(target, path + ".part")
            os.replace(path + ".part", path)

    return model, step, save


main()
