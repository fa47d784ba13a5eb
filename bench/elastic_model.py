"""The model, data and step log that all runs of bench/elastic.py share."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

WIDTHS = {"1M": (512, 850, 512, 256), "25M": (2500, 2500, 2500, 2500, 2500)}
BATCH = {"1M": 64, "25M": 16}
SAMPLES = 4096


def build(size: str) -> nn.Module:
    """Linear layers with about 1.0 or 25.0 million parameters."""
    torch.manual_seed(0)
    widths = WIDTHS[size]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    """Plain FSDP2. The optimizer gets the sharded parameters."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer.param_groups[0]["params"] = list(model.parameters())


class Rows(torch.utils.data.Dataset):
    """Random rows, made once."""

    def __init__(self, size: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES if size == "1M" else 512, WIDTHS[size][0], generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.x[i]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self.x[indices])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


class StepLog:
    """One line per step: time (of the machine, so that processes compare), step, number of workers."""

    def __init__(self, name: str) -> None:
        self._file = open(os.path.join(os.environ["STEP_LOG"], f"{name}.{os.getpid()}"), "a")  # noqa: SIM115

    def step(self, step: int, workers: int) -> None:
        self._file.write(f"{time.clock_gettime(time.CLOCK_MONOTONIC):.6f} {step} {workers}\n")
        self._file.flush()
