"""This worker's copy of what the job trains: the models, their optimizers and gradient buckets.

All parts of a job reach the models through a `Replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from shoal.torch.gradients import GradientBuckets
from shoal.torch.registered import check_registered
from shoal.torch.state import ModelState, StateBox
from torch import nn

if TYPE_CHECKING:  # torch's private parts are imported only for sharded models
    from shoal.torch.sharding.gradients import ShardGradients
    from shoal.torch.sharding.shard_groups import ShardGroups
    from shoal.torch.sharding.shard_set import ShardSet


_Parameters = dict[int, tuple[str, str]]
"""By identity: its name, and its type and device."""


_WRAPPERS = {
    "DistributedDataParallel": "leave it out, and init_process_group, too; the job sums the gradients itself",
    "DataParallel": "leave it out; each worker of the job has one GPU",
    "FullyShardedDataParallel": "leave it out and use job.shard(model, optimizer), which shards it with FSDP2",
    "DeepSpeedEngine": "leave it out, or run the job with restarts and DeepSpeed's own checkpoints (--resize restart)",
}
"""Wrappers that distribute a model themselves, by name: they need not be imported to be recognised."""


ONE_SHARDED = (
    "a job with a sharded model has no other: make them parts of one module, with one optimizer, or replicate them: "
    "job.wrap(models=[a, b], optimizers=[c, d])"
)


class Replica:
    """Empty until `job.wrap`."""

    def __init__(self, box: StateBox) -> None:
        self.box = box
        #: None outside Shoal, where there is nothing to synchronize.
        self.buckets: GradientBuckets | None = None
        self._state: ModelState | None = None
        self._wrapped: tuple[tuple[nn.Module, ...], tuple[torch.optim.Optimizer, ...], _Parameters] | None = (
            None
        )
        self._make_buckets: Callable[[], GradientBuckets] | None = None
        #: A model that is sharded over all workers: its rows move when the workers change.
        self.shard_set: ShardSet | None = None
        #: A model that is sharded over groups of workers: the groups are replicas of each other.
        self.shard_groups: ShardGroups | None = None

    @property
    def sharded(self) -> ShardSet | ShardGroups | None:
        """Of which several workers have to gather the state before one can save it."""
        return self.shard_set or self.shard_groups

    @property
    def state(self) -> ModelState:
        if self._state is None:
            raise RuntimeError("call job.wrap(model, optimizer) before training")
        return self._state

    @property
    def least_samples(self) -> int:
        """Fewest samples that a worker can train on. Batch norm does not train on a single one."""
        modules = self.state.model.modules()
        return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules) else 1

    @property
    def on_gpu(self) -> bool:
        return any(p.is_cuda for p in self.state.model.parameters())

    @property
    def several(self) -> bool:
        """Several optimizers: a step may have several backward passes, and a newcomer gets the state at once."""
        return self._state is not None and len(self._state.optimizers) > 1

    @property
    def is_broken(self) -> bool:
        """A collective of a sharded model has broken."""
        return self.sharded is not None and self.sharded.shards.collectives.broken

    def mute(self, on: bool) -> None:
        """In the rest of a step that is done again: other workers are elsewhere, so a sharded model gathers nothing."""
        if self.sharded is not None:
            self.sharded.shards.mute(on)

    def meet_for_exchange(self) -> None:
        """The workers of a sharded model exchange values of the script: all of them must do that now."""
        if self.sharded is not None:
            self.sharded.together.at_exchange()

    def check_empty(self, shards: bool = False) -> None:
        """`shards`: the model that is to come is sharded."""
        if self._state is None:
            return
        if shards or self.sharded is not None:
            raise RuntimeError(ONE_SHARDED)
        raise RuntimeError(
            "wrap() was called twice: pass everything at once, as job.wrap(models=[a, b], optimizers=[c, d])"
        )

    @staticmethod
    def check_fits(models: Sequence[nn.Module]) -> None:
        """Refuse models that another wrapper distributes, and sparse gradients: they cannot be summed in buckets."""
        for module in (module for model in models for module in model.modules()):
            if advice := _WRAPPERS.get(type(module).__name__):
                raise ValueError(f"the model is wrapped in {type(module).__name__}: {advice}")
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ValueError("sparse gradients are not supported: use Embedding(sparse=False)")

    def use(
        self,
        state: ModelState,
        buckets: ShardGradients | None,
        *,
        shard_set: ShardSet | None = None,
        shard_groups: ShardGroups | None = None,
    ) -> None:
        """A sharded model: over all workers, or over groups of them."""
        self._state, self.shard_set, self.shard_groups = state, shard_set, shard_groups
        self.buckets = cast(GradientBuckets | None, buckets)  # it has their interface
        self._remember([state.model], state.optimizers)

    def wrap(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.check_empty()
        if any(isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules()):
            raise ValueError(
                "SyncBatchNorm needs torch's own process group, which Shoal does not use, and would not be "
                "synchronized: use BatchNorm, whose running statistics job.wrap averages over the workers"
            )
        self._state = ModelState(models, optimizers, self.box)
        self._remember(models, optimizers)

    def _remember(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._wrapped = tuple(models), tuple(optimizers), _parameters(models, optimizers)

    def check_registered(self) -> None:
        """Refuse schedules, scalers and averages of the weights that would not travel."""
        if self._wrapped is not None:
            everything = [*self.box.values(), *self.box.own.values()]
            check_registered(self._wrapped[1], everything, sharded=self.sharded is not None)

    def check_unchanged(self) -> None:
        """Parameters that came, went or moved after `wrap` or `shard` are not summed: the workers would diverge."""
        if self._wrapped is None:
            return
        if self.sharded is not None:
            self.sharded.shards.release()  # an evaluation leaves gathered parameters in the place of the sharded ones
        models, optimizers, before = self._wrapped
        now = _parameters(models, optimizers)
        if now.keys() == before.keys() and all(now[key][1:] == before[key][1:] for key in now):
            return
        changed = [v[0] for k, v in now.items() if k not in before or v[1:] != before[k][1:]]
        changed += [v[0] for k, v in before.items() if k not in now]
        call = "job.shard()" if self.sharded is not None else "job.wrap()"
        raise RuntimeError(
            f"the model or its optimizer was changed after {call}: {', '.join(changed[:3])}. Build the model, load its "
            f"weights, move it to its device and type, and make the optimizer before {call}"
        )

    def synchronize(
        self,
        bucket_mib: float,
        complete: Callable[[], None],
        part_complete: Callable[[], None] = lambda: None,
        later: bool = False,
    ) -> None:
        """Put the gradients into buckets.

        `complete` is called at the end of the armed backward of a step's last micro-batch, `part_complete` at that of
        the others. `later`: only if they are required.
        """
        state = self.state
        self._make_buckets = lambda: GradientBuckets(
            state.model, bucket_mib, complete=complete, others=state.others, part_complete=part_complete
        )
        if not later:
            self.required_buckets()

    def required_buckets(self) -> GradientBuckets:
        """The buckets, also where gradients are not summed: outside Shoal."""
        if self.buckets is None:
            if self._make_buckets is None:
                raise RuntimeError("weights with accumulate need Shoal's workers if the model is sharded")
            self.buckets = self._make_buckets()
        return self.buckets

    def keep_stats(self) -> None:
        if self.buckets is not None:
            self.buckets.keep_stats()


def _parameters(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> _Parameters:
    found: _Parameters = {}
    for model in models:
        for name, p in model.named_parameters():
            found[id(p)] = (name, f"{p.dtype} on {p.device}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found.setdefault(id(p), ("a parameter of the optimizer", f"{p.dtype} on {p.device}"))
    return found
