"""Elastic training: a PyTorch job whose workers change while it trains.

import shoal.torch as shoal

job = shoal.init()
model, optimizer = job.wrap(model, optimizer)
loader = job.loader(dataset, batch_size=64)
for epoch in job.epochs(10):
    for x, y in loader: ...
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

if find_spec("torch") is None:
    where = f" on node {os.environ['SHOAL_NODE']}" if "SHOAL_NODE" in os.environ else ""
    raise ImportError(f"shoal.torch needs PyTorch{where}: pip install torch")

import torch
from shoal.torch.gradients import Sync, all_reduce
from shoal.torch.job import Job
from shoal.torch.versions import check_oldest
from shoal.torch.worker import Identity

check_oldest(torch.__version__)

__all__ = ["Job", "current", "init"]

_job: Job | None = None


def init(
    *,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_every_s: float | None = None,
    checked: bool = False,
    rehearse: bool = True,
    sync: Sync = all_reduce,
) -> Job:
    """This process's part of the job. Outside Shoal it is the whole job, a plain single process.

    Args:
        seed: fixes the order of the data.
        checkpoint: where `job.checkpoint()` writes, and from where a single process continues. Shoal may set it, too.
        checkpoint_every_s: write a checkpoint at this interval.
        checked: compare all members' states bit for bit after each change of members.
        rehearse: if False, a newcomer joins without running one step of the script by itself first.
        sync: replaces the function that sums a flat bucket of gradients over the members.
    """
    global _job
    _job = Job(
        Identity.from_environment(),
        seed=seed,
        checkpoint=checkpoint,
        checkpoint_every_s=checkpoint_every_s,
        checked=checked,
        rehearse=rehearse,
        sync=sync,
    )
    return _job


def current() -> Job | None:
    """The job that `init` has made in this process."""
    return _job
