"""Synthetic jobs with the ranges of Liquid's published generator, and a model of the resources they use.

Liquid's measurements are not public. The ranges are those of its generator:

    resnet50, inception3   num_gpus 1..2, batch_size 4..32 step 4,  num_batches 200..1000 step 50
    vgg16                  num_gpus 1..2, batch_size 16..32 step 4, num_batches 200..500 step 50
    distributed            the same with 1 server and 2 workers of one GPU each
    cnn, neumf             one GPU; neumf has batch_size 1000

The resources are our model, not measurements. It resembles a K80, with constants per model: parameters P (MB),
activations A (MB per sample) and time C (s per sample):

    step_s   = C b + transfer_s,   transfer_s = 2 P (copies) / link,  copies 0 for one GPU
    gpu_mem  = 350 + 3 P + A b, plus a workspace that the library chooses by batch size (1, 2, 4 times its
               unit at b > 8, b > 16), rounded up to the allocator's 256 MB, at most 11,441
    gpu_util = 100 C b / step_s · input(b); its spread grows with the time that the GPU waits
    bw       = traffic / step_s for servers and workers, almost 0 for local jobs
    noise    every figure times a lognormal factor, 10 % by default

Memory has steps, and utilisation and bandwidth are ratios: non-linear, with interactions, and noisy, as
measured jobs are. A linear model can follow the trend but not the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.knowledge.features import Features, task_features
from shoal.knowledge.resources import Example

NOISE = 0.1
_GPU_MEM_MB = 11_441
_PCIE_MB_S = 6_000.0
_NETWORK_MB_S = 1_100.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Constants of one model of the generator, and the ranges of its flags (low, high, step)."""

    name: str
    parameters_mb: float
    activations_mb: float
    compute_s: float
    workspace_mb: float
    batch: tuple[int, int, int]
    batches: tuple[int, int, int]
    max_gpus: int = 2


WORKLOADS = {
    w.name: w
    for w in (
        Workload("resnet50", 102, 95, 0.022, 420, (4, 32, 4), (200, 1000, 50)),
        Workload("inception3", 95, 82, 0.034, 380, (4, 32, 4), (200, 1000, 50)),
        Workload("vgg16", 553, 120, 0.030, 900, (16, 32, 4), (200, 500, 50)),
        Workload("cnn", 13, 2, 0.0004, 64, (32, 128, 32), (200, 1000, 50), max_gpus=1),
        Workload("neumf", 60, 0.4, 0.00002, 32, (1000, 1000, 1), (200, 1000, 50), max_gpus=1),
    )
}


def draw_example(
    rng: np.random.Generator,
    names: tuple[str, ...] = ("resnet50", "inception3", "vgg16"),
    noise: float = NOISE,
) -> Example:
    """One finished task of a random model, local or distributed with equal probability (if possible)."""
    work = WORKLOADS[names[int(rng.integers(len(names)))]]
    distributed = work.max_gpus > 1 and bool(rng.integers(2))
    gpus = 1 if distributed else int(rng.integers(1, work.max_gpus + 1))
    batch, batches = _draw(rng, work.batch), _draw(rng, work.batches)
    is_server = distributed and bool(rng.integers(3) == 0)
    command = ["--model=" + work.name, f"--batch_size={batch}", f"--num_batches={batches}"]
    features = task_features(
        command,
        num_gpus=gpus,
        servers=1 if distributed else 0,
        workers=2 if distributed else 1,
        is_server=is_server,
    )
    return Example(features, measured_use(rng, work, features, noise))


def measured_use(
    rng: np.random.Generator, work: Workload, features: Features, noise: float = NOISE
) -> dict[str, float]:
    """The measured resources of the task: the model above with noise."""
    truth = true_use(work, features)
    noisy = {name: value * math.exp(rng.normal(0.0, noise)) for name, value in truth.items()}
    noisy["gpu_util"] = min(noisy["gpu_util"], 100.0)
    noisy["gpu_mem_mb"] = min(noisy["gpu_mem_mb"], _GPU_MEM_MB)
    return noisy


def true_use(work: Workload, features: Features) -> dict[str, float]:
    """The model's figures without noise."""
    batch, batches = int(features["batch_size"]), int(features["num_batches"])
    gpus, workers = int(features["num_gpus"]), int(features["worker_number"])
    distributed, is_server = workers > 1, features["role"] == 1
    compute_s = work.compute_s * batch
    traffic_mb = 2 * work.parameters_mb * (workers if is_server else 1) if distributed else 0.0
    transfer_s = 2 * work.parameters_mb * workers / _NETWORK_MB_S if distributed else 0.0
    transfer_s += 2 * work.parameters_mb * (gpus - 1) / _PCIE_MB_S
    step_s = compute_s + transfer_s + 0.004
    busy = compute_s / step_s * (0.97 if batch >= 8 else 0.9)
    util = 4.0 if is_server else 100 * busy
    memory = _gpu_memory_mb(work, batch, is_server)
    input_mb_s = 0.15 * batch * gpus / step_s
    return {
        "cpu": 100 * (1.2 + 2.5 * busy * gpus + (3.0 if is_server else 0.0)),
        "cpu_mean": 100 * (0.8 + 1.8 * busy * gpus + (2.0 if is_server else 0.0)),
        "cpu_std": 30 + 40 * (1 - busy),
        "mem_mb": 1800 + 4 * work.parameters_mb + 12 * batch * gpus,
        "bw_rx_kb_s": 1000 * (traffic_mb / step_s + 0.02 * input_mb_s) + 40,
        "bw_tx_kb_s": 1000 * (traffic_mb / step_s) + 20,
        "gpu_util": util,
        "gpu_util_std": 3.0 + 45 * busy * (1 - busy),
        "gpu_mem_mb": memory,
        "total_s": 25.0 + batches * step_s / gpus,
    }


def _gpu_memory_mb(work: Workload, batch: int, is_server: bool) -> float:
    if is_server:
        return 350.0
    workspace = work.workspace_mb * (1 if batch <= 8 else 2 if batch <= 16 else 4)
    wanted = 350 + 3 * work.parameters_mb + work.activations_mb * batch + workspace
    return float(min(math.ceil(wanted / 256) * 256, _GPU_MEM_MB))


def _draw(rng: np.random.Generator, bounds: tuple[int, int, int]) -> int:
    low, high, step = bounds
    return low + step * int(rng.integers((high - low) // step + 1))
