"""What `ElasticTrainer` refuses, with what to do instead."""

from __future__ import annotations

from typing import Any

from accelerate.utils import parse_flag_from_env


def check_arguments(args: Any) -> None:
    """Raise ValueError if the training arguments ask for something that cannot be resized."""
    if args.deepspeed or _launched_with("DEEPSPEED"):
        raise ValueError(
            "ElasticTrainer does not work with DeepSpeed: leave out `deepspeed` (and ACCELERATE_USE_DEEPSPEED), or use "
            "Trainer in a job that is resized by restarts (`shoal run --resize restart`)"
        )
    if args.fsdp or _launched_with("FSDP"):
        raise ValueError(
            "leave out `fsdp` (and ACCELERATE_USE_FSDP): ElasticTrainer keeps the whole model on each worker. For a "
            "sharded model write the loop with job.shard(model, optimizer), see docs/elastic.md"
        )
    if args.auto_find_batch_size:
        raise ValueError("leave out `auto_find_batch_size`: the batch is that of all workers together")
    if args.batch_eval_metrics:
        raise ValueError("leave out `batch_eval_metrics`: each worker evaluates some of the batches")
    args._n_gpu = min(args.n_gpu, 1)  # a worker has one GPU; the Trainer would use all that it sees


def _launched_with(name: str) -> bool:
    """Accelerate's launcher and configuration ask for it in the environment, which the arguments do not show."""
    return parse_flag_from_env(f"ACCELERATE_USE_{name}")


def check_model(model: Any) -> None:
    """Raise ValueError if the model is spread over several devices."""
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(devices) > 1:
        raise ValueError(
            f"the model is spread over the devices {', '.join(sorted(devices))}: load it without `device_map`. Each "
            "worker of an elastic job has the whole model on its GPU"
        )
