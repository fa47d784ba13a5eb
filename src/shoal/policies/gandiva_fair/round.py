"""One decision in the making: the jobs, the nodes, and what is settled about them so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.gandiva_fair.kernels import NOWHERE, BoolArray, FloatArray, IntArray
from shoal.policies.gandiva_fair.spans import SpanArrays


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes as fair sharing sees them: those of the cluster, or one per type where GPUs are a pool."""

    gpus: IntArray
    type_of: IntArray
    pooled: bool

    @classmethod
    def of(cls, supply: Supply) -> Nodes:
        if supply.cluster.pooled:
            return cls(supply.gpus_of_type, np.arange(len(supply.gpus_of_type), dtype=np.int32), True)
        return cls(supply.gpus_of_node, supply.cluster.type_of_node, False)


#: Less than this part of all that a user has is nothing to bind jobs for.
_CRUMB = 0.01


@dataclass(slots=True)
class Round:
    """Filled in step by step by `GandivaFair.decide`."""

    view: View
    nodes: Nodes
    gpus_of_type: IntArray
    now_s: float
    new_quantum: bool
    #: [type, row]: speed of the gang there, as far as it is known; 0 where it cannot run.
    speed: FloatArray
    #: Demand of each user in GPUs, and its part of each type.
    demand: FloatArray
    weights: FloatArray
    #: Where each row is bound, and on which type; see `kernels`.
    home: IntArray
    types: IntArray
    spans: SpanArrays
    quantum_s: float
    #: [user, type]: what users had too little of, in GPU quanta; and of each user, how much more that counts.
    owed: FloatArray
    urgency: FloatArray
    #: Turns that each row may wait: see `waited_turns`.
    patience_turns: float
    #: Rows that change their place in this round.
    moved: set[int] = field(default_factory=set)

    @property
    def size(self) -> IntArray:
        return self.view.requested_gpus

    @property
    def lag(self) -> FloatArray:
        return self.view.column("lag_gpu_s")

    @property
    def rate(self) -> FloatArray:
        """GPUs each row is due."""
        return self.view.column("due_gpus")

    @property
    def waited_turns(self) -> FloatArray:
        """How long each row has waited, in turns: quanta until it is due a quantum of its gang."""
        waited_s = np.where(self.view.gpus == 0, self.now_s - self.view.changed_s, 0.0)
        return np.asarray(waited_s * self.rate / (self.size * self.quantum_s))

    @property
    def owned(self) -> BoolArray:
        """[user, type]: whether the user has a part of the type worth the name, not a crumb that trading left."""
        return np.asarray(self.weights > _CRUMB * self.weights.sum(axis=1, keepdims=True))

    @property
    def bound(self) -> BoolArray:
        return np.asarray(self.home != NOWHERE)

    def free(self, runs: BoolArray) -> IntArray:
        """GPUs of each node that those who run leave."""
        small = runs & (self.home >= 0)
        taken = np.bincount(self.home[small], weights=self.size[small], minlength=len(self.nodes.gpus))
        spanning = self.spans.gpus_of_nodes(runs.astype(np.float64), len(self.nodes.gpus))
        return np.maximum(self.nodes.gpus - taken - spanning, 0).astype(np.int32)

    def spanning_tickets(self) -> FloatArray:
        """Tickets that gangs over several nodes bring to each of them."""
        return self.spans.gpus_of_nodes(self.rate / self.size, len(self.nodes.gpus))


Rows = NDArray[np.int64]
