"""`shoal.torch` as the script sees it: a job whose workers may change between any two steps.

A `Job` owns the parts below. Each part owns its state; no part reads another's private fields.

| part              | file           | owns                                                 | uses                    |
|-------------------|----------------|------------------------------------------------------|-------------------------|
| `Session`         | session.py     | membership: worker, generation, contributors, groups | `Worker`                |
| `Replica`         | replica.py     | model, optimizer, `job.state`, gradient buckets      |                         |
| `DataOrder`       | data_order.py  | position, epochs, batch rule                         | session                 |
| `Loader`          | loader.py      | the samples: loader processes, streams               | order, loop             |
| `Handover`        | handover.py    | the present window; `Sending` and `Receiving`        | session, replica, order |
| `Vote`            | vote.py        | the ballots, a newcomer's early vote                 | session                 |
| `Steps`           | step.py        | the present step, the sync function                  | all of the above        |
| `Checkpoints`     | checkpoint.py  | path, interval, requests served                      | all but vote, handover  |
| `StateCheck`      | checked.py     | whether a comparison is due                          | session, replica, order |
| `Reconfiguration` | reconfigure.py | nothing: it orders the calls at a change of members  | all of the above        |
| `Loop`            | loop.py        | whether the script is in `job.epochs`                | reconfiguration, steps  |
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shoal.torch.checked import StateCheck
from shoal.torch.checkpoint import Checkpoints
from shoal.torch.data_order import DataOrder
from shoal.torch.exits import report_exit
from shoal.torch.gradients import Sync, all_reduce
from shoal.torch.handover import Handover
from shoal.torch.loader import Loader
from shoal.torch.loop import Loop
from shoal.torch.meter import Meter
from shoal.torch.order import BatchRule, Position
from shoal.torch.reconfigure import Reconfiguration
from shoal.torch.replica import Replica
from shoal.torch.session import Session
from shoal.torch.state import StateBox
from shoal.torch.step import Steps
from shoal.torch.vote import Vote
from shoal.torch.worker import Identity, Worker
from torch import nn


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a job, for integrations and tests. Scripts do not need them."""

    worker: Worker | None
    session: Session
    replica: Replica
    order: DataOrder
    handover: Handover
    vote: Vote
    steps: Steps
    checkpoints: Checkpoints
    check: StateCheck
    reconfiguration: Reconfiguration
    loop: Loop


class Job:
    """Made by `shoal.torch.init`."""

    def __init__(
        self,
        identity: Identity | None,
        *,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        checkpoint_every_s: float | None = None,
        checked: bool = False,
        rehearse: bool = True,
        sync: Sync = all_reduce,
    ) -> None:
        self.state = StateBox()
        self.meter = meter = Meter()
        worker = Worker(identity, meter, lambda: order.progress()) if identity is not None else None
        path = str(checkpoint) if checkpoint else (identity.checkpoint if identity is not None else None)
        checked = checked or os.environ.get("SHOAL_CHECKED") == "1"
        session = Session(worker)
        replica = Replica(self.state)
        order = DataOrder(session, seed, meter.note)
        handover = Handover(session, replica, order, meter.note)
        vote = Vote(session)
        steps = Steps(session, replica, order, handover, vote, meter, sync)
        checkpoints = Checkpoints(session, replica, order, steps, meter, path, checkpoint_every_s)
        check = StateCheck(session, replica, order, meter.note, checked)
        change = Reconfiguration(session, replica, order, handover, vote, steps, checkpoints, check, meter)
        loop = Loop(session, replica, order, steps, checkpoints, change, meter, rehearse)
        self.parts = Parts(
            worker, session, replica, order, handover, vote, steps, checkpoints, check, change, loop
        )
        if worker is not None:
            worker.link.start()
            report_exit(session, change.finish)

    @property
    def rank(self) -> int:
        return self.parts.session.rank

    @property
    def world_size(self) -> int:
        return self.parts.session.world_size

    @property
    def generation(self) -> int:
        return self.parts.session.generation

    @property
    def is_main(self) -> bool:
        """Whether this worker should print, evaluate or save: rank 0, in steps that count."""
        return self.rank == 0 and self.parts.steps.counts

    @property
    def rehearsing(self) -> bool:
        """A newcomer runs one step of the script before it joins. Nothing of it counts."""
        return self.parts.steps.rehearsing

    @property
    def stepping(self) -> bool:
        """With `accumulate`: whether this micro-batch completes the step."""
        return self.parts.steps.is_last_micro_batch

    @property
    def weight(self) -> float:
        """This worker's share of the present batch."""
        return self.parts.steps.weight

    @property
    def position(self) -> Position:
        return self.parts.order.position

    @property
    def seed(self) -> int:
        return self.parts.order.seed

    @property
    def checkpoint_path(self) -> str | None:
        return self.parts.checkpoints.path

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, bucket_mib: float = 25.0
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make a model and its optimizer elastic. Returns the same objects."""
        replica, steps = self.parts.replica, self.parts.steps
        replica.wrap(model, optimizer)
        self.parts.order.least_samples = replica.least_samples
        original = optimizer.step

        def step(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return steps.optimizer_step(this, original, *args, **kwargs)

        # Bound to the optimizer: learning-rate schedulers wrap it in turn and expect a method.
        optimizer.step = types.MethodType(step, optimizer)
        if not self.parts.session.outside_shoal:
            if replica.on_gpu:
                self.parts.session.use_gpu()
            replica.synchronize(bucket_mib, self.parts.loop.end_of_backward)
        return model, optimizer

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        lr_rule: str = "linear",
        warmup_steps: int = 20,
        accumulate: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """The training data. `batch_size` is that of all workers together; `options` go to torch's DataLoader."""
        if self.parts.order.has_loader:
            raise RuntimeError("a job has one training loader; use a plain DataLoader to evaluate")
        for name in ("sampler", "batch_sampler", "drop_last", "persistent_workers", "in_order"):
            if name in options:
                raise ValueError(f"{name} cannot be given: the order of the data belongs to the job")
        return Loader(
            self.parts.loop,
            self.parts.order,
            self.meter,
            dataset,
            BatchRule(batch_size, max_batch_size, lr_rule, warmup_steps),
            accumulate=accumulate,
            shuffle=shuffle,
            num_workers=num_workers,
            collate_fn=collate_fn,
            **options,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to do, wherever the job stands."""
        if count < 1:
            raise ValueError(f"epochs must be at least 1, not {count}")
        yield from self.parts.loop.epochs(count)

    def log(self, **values: Any) -> None:
        """Values to report (the last of each is kept): numbers, or tensors of one element."""
        if self.parts.steps.counts:
            for name, value in values.items():
                self.meter.values[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def checkpoint(self, path: str | Path | None = None) -> bool:
        """Save the whole state at rank 0, completely or not at all. False if it could not be written."""
        return self.parts.checkpoints.save(path)
