"""Trains a model that is sharded over groups of two workers, until it is told to end. Main writes a row per step."""

import sys
import time
from pathlib import Path

import shoal.torch as shoal
import torch
from torch import nn

HERE = Path(sys.argv[1])


def main() -> None:
    job = shoal.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = job.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.01), layers=nn.Linear, group=2
    )
    loader = job.loader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    for _ in job.epochs(100_000):
        for x in loader:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)
            if job.is_main:
                with open(HERE / "steps", "a") as rows:
                    rows.write(f"{job.position.step} {job.world_size}\n")
        if job.any((HERE / "end").exists()):
            break


main()
