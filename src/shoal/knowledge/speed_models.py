"""Models of the time of one training step that are linear in their non-negative coefficients.

Each model is a function from configurations to design rows X such that

    seconds per step = X θ,   θ >= 0,   speed f = 1 / (X θ)  steps/s.

Optimus (EuroSys'18), parameter servers, p servers, w workers, global batch M:

    sync:   f = (θ0 M/w + θ1 + θ2 w/p + θ3 w + θ4 p)^-1
    async:  f = w (θ0 + θ1 w/p + θ2 w + θ3 p)^-1        (rows divided by w, so that 1/f = X θ again)

All-reduce (ours), n GPUs on N nodes, b samples per GPU and step:

    f = (θ0 b + θ1 + θ2 (n-1)/n + θ3 [N>1] (n-1)/n + θ4 (n-1))^-1

θ0: forward and backward pass. θ1: the fixed cost of a step (optimizer, launch, input).
θ2: a ring moves 2 (n-1)/n times the gradient through each link, so its time saturates with n.
θ3: the same amount through the slower link if the ring spans nodes. A ring has one link from each node to
the next, so it matters whether it leaves a node, not how many nodes it visits.
θ4: each of the 2 (n-1) phases of a ring waits for its slowest member: latency and jitter grow with n.
With a fixed global batch (b = M/n) the terms of θ0, θ1 and θ2 are linearly dependent: the curve is determined,
its coefficients are not. On measured steps (placements and runs up to 64 GPUs of six models), variants with
log2(n), with (N-1)/N, or with another term for N were equal or worse on held-out points. Without θ3 or θ4 the
error grows by up to 3 and 4.5 percentage points; without θ2 it hardly changes on that data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """A linear model of step time.

    `shares` is the split of a step's time over the terms that is assumed before any measurement, and `ridge`
    the number of measurements that this assumption counts as (see `speed_fit.fit_speed`).
    """

    name: str
    columns: tuple[str, str, str]
    terms: tuple[str, ...]
    shares: tuple[float, ...]
    ridge: float
    rows: Callable[[Floats], Floats]


def _sync_ps_rows(configs: Floats) -> Floats:
    servers, workers, batch = configs.T
    return np.stack([batch / workers, np.ones_like(workers), workers / servers, workers, servers], axis=1)


def _async_ps_rows(configs: Floats) -> Floats:
    servers, workers, _ = configs.T
    per_worker = np.stack([np.ones_like(workers), workers / servers, workers, servers], axis=1)
    return np.asarray(per_worker / workers[:, None])


def _allreduce_rows(configs: Floats) -> Floats:
    gpus, nodes, local_batch = configs.T
    ring = (gpus - 1) / gpus
    crosses = (nodes > 1).astype(np.float64)
    return np.stack([local_batch, np.ones_like(gpus), ring, crosses * ring, gpus - 1], axis=1)


SYNC_PS = SpeedModel(
    name="sync-ps",
    columns=("servers", "workers", "global batch"),
    terms=("compute", "fixed", "transfer", "per worker", "per server"),
    shares=(0.2, 0.2, 0.2, 0.2, 0.2),
    ridge=0.03,
    rows=_sync_ps_rows,
)
ASYNC_PS = SpeedModel(
    name="async-ps",
    columns=("servers", "workers", "global batch"),
    terms=("compute", "transfer", "per worker", "per server"),
    shares=(0.4, 0.2, 0.2, 0.2),
    ridge=0.03,
    rows=_async_ps_rows,
)
ALL_REDUCE = SpeedModel(
    name="all-reduce",
    columns=("gpus", "nodes", "samples per gpu"),
    terms=("compute", "fixed", "ring", "ring between nodes", "per gpu"),
    shares=(0.6, 0.1, 0.1, 0.1, 0.1),
    ridge=0.1,
    rows=_allreduce_rows,
)
MODELS = {model.name: model for model in (SYNC_PS, ASYNC_PS, ALL_REDUCE)}
