"""The training script of bench/elastic.py with shoal.torch. SHARD: empty (replicated), `set` or `groups`."""

from __future__ import annotations

import os

import shoal.torch as shoal
from elastic_model import BATCH, Rows, StepLog, build, loss_of, optimizer_for
from torch import nn


def main() -> None:
    size = os.environ["MODEL"]
    job = shoal.init()
    model = build(size)
    shard, optimizer = os.environ.get("SHARD", ""), optimizer_for(model)
    if shard:
        job.shard(model, optimizer, layers=nn.Linear, group=2 if shard == "groups" else None)
    else:
        job.wrap(model, optimizer)
    loader = job.loader(Rows(size), batch_size=BATCH[size])
    log = StepLog(os.environ.get("SHOAL_WORKER", "alone"))
    for _ in job.epochs(10**6):
        for x in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            job.log(loss=loss)
            if job.weight:  # a newcomer that only looks on does not step yet
                log.step(job.position.step, job.world_size)


main()
