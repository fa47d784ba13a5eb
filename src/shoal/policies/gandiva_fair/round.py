"""The working data of one decision of gandiva-fair."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.view import View
from shoal.policies.gandiva_fair.spans import gpus_of_nodes
from shoal.policies.gandiva_fair.tables import NOWHERE, Jobs, Nodes, Spans

#: A share of a type below this part of all that the user has is a rounding remainder of trading. The user binds no
#: jobs for it.
_REMAINDER = 0.01


@dataclass(slots=True)
class Round:
    """Filled in step by step by `GandivaFair.decide`."""

    view: View
    nodes: Nodes
    pooled: bool
    gpus_of_type: IntArray
    now_s: float
    new_quantum: bool
    #: [type, row]: speed of the gang there, as far as it is known; 0 where it cannot run.
    speed: FloatArray
    #: GPUs that each user can use, and [user, type] its shares after trading.
    demand: FloatArray
    weights: FloatArray
    #: Where each row is bound, and on which GPU type: see `tables.Jobs`.
    home: IntArray
    types: IntArray
    spans: Spans
    #: Rows that change their nodes in this decision.
    moved: set[int] = field(default_factory=set)

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.size, self.home, self.due)

    @property
    def size(self) -> IntArray:
        return self.view.requested_gpus

    @property
    def lag(self) -> FloatArray:
        return self.view.column("lag_gpu_s")

    @property
    def due(self) -> FloatArray:
        """GPUs that each row is due."""
        return self.view.column("due_gpus")

    @property
    def owned(self) -> BoolArray:
        """[user, type]: whether the user has a share of the type."""
        return np.asarray(self.weights > _REMAINDER * self.weights.sum(axis=1, keepdims=True))

    @property
    def bound(self) -> BoolArray:
        return np.asarray(self.home != NOWHERE)

    def _used(self, runs: BoolArray) -> FloatArray:
        """GPUs of each node that these rows use."""
        small = runs & (self.home >= 0)
        count = len(self.nodes.gpus)
        used = np.bincount(self.home[small], weights=self.size[small], minlength=count).astype(np.float64)
        if len(self.spans.rows):
            used += gpus_of_nodes(self.spans, runs.astype(np.float64), count)
        return used

    def free(self, runs: BoolArray) -> IntArray:
        """GPUs of each node that are left when these rows run."""
        return np.maximum(self.nodes.gpus - self._used(runs), 0).astype(np.int32)

    @property
    def all_fit(self) -> bool:
        """Whether all jobs can run at once where they are bound."""
        return bool((self._used(self.bound) <= self.nodes.gpus).all())

    def spanning_tickets(self) -> FloatArray:
        """Tickets on each node of the gangs that span nodes."""
        return gpus_of_nodes(self.spans, self.due / self.size, len(self.nodes.gpus))
