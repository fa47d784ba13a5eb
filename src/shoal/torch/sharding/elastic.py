"""The mesh of an elastic sharded model, from the time before the worker joins a generation."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from shoal.torch.session import Session
from shoal.torch.sharding import private
from shoal.torch.sharding.private import Collectives
from shoal.torch.sharding.setup import check_model, check_sharded, shard
from shoal.torch.sharding.shards import Shards
from shoal.torch.sharding.versions import is_sharded
from torch import nn

S = TypeVar("S", bound=Shards)


class ElasticMesh:
    """Until it joins, this worker is the only one of the mesh and has all rows."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alone = Collectives(None, session.wait)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.mesh = private.make_mesh(self._alone, device)

    def shard(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Any,
        options: dict[str, Any],
        kind: type[S],
    ) -> S:
        """Shard a model, or accept one that the script has sharded over this mesh."""
        check_model(model, optimizer)
        if not is_sharded(model):
            shard(model, optimizer, self.mesh, layers, options)
        elif layers is not None or options:
            raise ValueError("fully_shard was applied already: leave out layers and its options")
        check_sharded(model, self.mesh)
        me = "alone" if self._session.outside_shoal else self._session.name
        return kind(model, optimizer, me, self.mesh, self._alone)
