"""One training step, and how long something takes, for the benches that alternate two ways of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from elastic_model import loss_of


def timed_s(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor]) -> None:
    x = next(batches)
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
