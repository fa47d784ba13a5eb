"""`job.shard`: one sharded set, or shard groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from shoal.torch.sharding.elastic import ElasticMesh
from shoal.torch.sharding.group_shards import GroupShards
from shoal.torch.sharding.shard_groups import make_shard_groups
from shoal.torch.sharding.shard_set import make_shard_set
from shoal.torch.sharding.shards import Shards
from torch import nn

if TYPE_CHECKING:
    from shoal.torch.job import Parts


def begin_sharded(
    mesh: ElasticMesh,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layers: Any,
    options: dict[str, Any],
    group: int | None,
    copy_every: int | None,
    parts: Parts,
    note: Callable[[str], None],
    checked: bool,
) -> None:
    """Let the parts of a job train a sharded model."""
    common = (
        parts.session,
        parts.replica,
        parts.order,
        parts.loop.end_of_backward,
        parts.steps.part_done,
        note,
    )
    if group is None:
        shards = mesh.shard(model, optimizer, layers, options, Shards)
        make_shard_set(shards, *common, copy_every, checked)
    else:
        make_shard_groups(mesh.shard(model, optimizer, layers, options, GroupShards), *common, group)
