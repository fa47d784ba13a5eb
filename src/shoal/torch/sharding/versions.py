"""The versions of torch whose sharded models can be resized. Private parts of torch are used for it (private.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

VERSIONS = ("2.13",)


def check_version(version: str = torch.__version__) -> None:
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(
            f"sharded models need torch {' or '.join(VERSIONS)}, and this is torch {version}: "
            "install such a version, or train a replicated model with job.wrap"
        )


def check_sharding(group: int | None, copy_every: int | None, env: Mapping[str, str] = os.environ) -> None:
    """The arguments of `job.shard`, and whether the job's range of GPUs fits them."""
    if copy_every is not None and copy_every < 1:
        raise ValueError(f"copy_every must be at least 1, not {copy_every}")
    if group is None:
        return
    if group < 2:
        raise ValueError(f"group must be at least 2 workers, not {group}: a replicated model is for job.wrap")
    if copy_every is not None:
        raise ValueError(
            "copy_every is for one sharded set: with group, the other groups have copies of all rows"
        )
    gpus = env.get("SHOAL_GPUS", "")
    low, _, rest = gpus.partition("..")
    high, _, step = rest.partition(":")
    sizes = [int(size) for size in (low, high, step) if size] if gpus else []
    if any(size % group for size in sizes) or (high and high != low and not step):
        least = -(-int(low) // group) * group
        most = max(int(high or low) // group * group, least)
        fitting = f"{least}..{most}:{group}" if high else str(least)
        raise ValueError(
            f"job.shard(group={group}) needs multiples of {group} GPUs, and the job has {gpus}: "
            f"start it with --gpus {fitting}"
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or to a part of it. Importing its class takes long."""
    kinds = (kind for module in model.modules() for kind in type(module).__mro__)
    return any(kind.__name__ == "FSDPModule" for kind in kinds)
