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
| `Meeting`         | meeting.py     | the present exchange of the script's values          | session, steps          |
| `StateCheck`      | checked.py     | whether a comparison is due                          | all but vote, handover  |
| `Reconfiguration` | reconfigure.py | nothing: it orders the calls at a change of members  | all of the above        |
| `Loop`            | loop.py        | whether the script is in `job.epochs`, caught errors | reconfiguration, steps  |

`UnknownOptimizers` (unknown_optimizers.py) finds those that train beside the job.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shoal.torch.checked import StateCheck
from shoal.torch.checkpoint import Checkpoints
from shoal.torch.data_order import DataOrder
from shoal.torch.evaluation import EvaluationLoader
from shoal.torch.exits import report_exit
from shoal.torch.gradients import Sync, all_reduce
from shoal.torch.handover import Handover
from shoal.torch.loader import Loader, check_options
from shoal.torch.loop import Loop
from shoal.torch.meeting import Meeting
from shoal.torch.meter import Meter
from shoal.torch.order import BatchRule, Position
from shoal.torch.reconfigure import Reconfiguration
from shoal.torch.reductions import mean_of, sum_of
from shoal.torch.replica import ONE_SHARDED, Replica
from shoal.torch.session import Session
from shoal.torch.shapes import mark_inputs_dynamic
from shoal.torch.sharding.versions import check_sharding, check_version, is_sharded
from shoal.torch.state import StateBox
from shoal.torch.state_files import StateFiles
from shoal.torch.step import Steps
from shoal.torch.unknown_optimizers import UnknownOptimizers
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
    meeting: Meeting
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
        self._checked = checked
        self._mesh: Any = None  # of a sharded model
        session = Session(worker)
        replica = Replica(self.state)
        order = DataOrder(session, seed, meter.note)
        handover = Handover(session, replica, order, meter.note)
        vote = Vote(session)
        steps = Steps(session, replica, order, handover, vote, meter, sync)
        files = worker.files if worker is not None else StateFiles(note=meter.note)
        checkpoints = Checkpoints(session, replica, order, steps, meter, files, path, checkpoint_every_s)
        meeting = Meeting(
            session,
            steps,
            lambda: change.halt(steps.holds, in_backward=False),
            replica.meet_for_exchange,
        )
        check = StateCheck(session, replica, order, meeting, meter.note, checked, sync is not all_reduce)
        change = Reconfiguration(
            session, replica, order, handover, vote, steps, checkpoints, check, meeting, meter
        )
        self._unknown = UnknownOptimizers(session, replica, steps)
        steps.halt = lambda: change.halt(holds=False)
        loop = Loop(session, replica, order, steps, checkpoints, change, meeting, check, meter, rehearse)
        self.parts = Parts(
            worker, session, replica, order, handover, vote, steps, checkpoints, meeting, check, change, loop
        )
        if worker is not None:
            worker.link.start()
            report_exit(session, loop.finish)

    @property
    def rank(self) -> int:
        self._check_known("job.rank", "every worker would read 0, also newcomers")
        return self.parts.session.rank

    @property
    def world_size(self) -> int:
        self._check_known("job.world_size", "every worker would read 1")
        return self.parts.session.world_size

    def _check_known(self, what: str, otherwise: str) -> None:
        session = self.parts.session
        if not (session.joined or session.retreated or self.rehearsing):
            raise RuntimeError(
                f"{what} is not known before job.epochs(): {otherwise}. For what should happen once, use job.is_main, "
                "job.is_first (false on newcomers and after a restart) or job.once(name). The batch size of job.loader "
                "is that of all workers together"
            )

    @property
    def generation(self) -> int:
        return self.parts.session.generation

    @property
    def is_main(self) -> bool:
        """Whether this worker should print, evaluate or save: rank 0, in steps that count.

        Before `job.epochs` it is true on the worker that will be rank 0, and false on every newcomer.
        """
        if not self.parts.session.joined and not self.parts.session.retreated:
            return self.parts.session.leads and not self.rehearsing
        return self.parts.session.rank == 0 and self.parts.steps.counts

    @property
    def is_first(self) -> bool:
        """Whether this worker's script began the job: not that of a newcomer, nor of a job that was resumed."""
        return self.parts.session.is_fresh

    def once(self, what: str) -> bool:
        """True on one worker, once in the life of the job: `if job.once("header"): ...`."""
        done = self.state.own.setdefault("once", [])
        if what in done or not self.parts.steps.counts:
            return False
        if not self.parts.session.joined and not self.is_first:
            return False  # a newcomer, or a resumed job: it learns what is done when it joins
        self.state.own["once"] = [*done, what]
        return self.is_main

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
    def amount(self) -> float:
        """What this worker's batches of the present step count so far: by the loader's `weight`, else in samples.

        A worker without a part of a batch gets two samples, so that the script runs. They count nothing.
        """
        return self.parts.steps.amount or 0.0

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
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        models: Sequence[nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        bucket_mib: float = 25.0,
    ) -> tuple[Any, Any]:
        """Make a model and its optimizer elastic, or several: `wrap(models=[g, d], optimizers=[a, b])`.

        Returns the same objects, as they were given. `schedulers` (of learning rates) travel by themselves.
        """
        if (model is None) == (not models) or (optimizer is None) == (not optimizers):
            raise ValueError(
                "give a model and its optimizer, job.wrap(model, optimizer), or several: "
                "job.wrap(models=[...], optimizers=[...])"
            )
        if model is not None and optimizer is not None and is_sharded(model):
            return self.shard(model, optimizer, schedulers=schedulers)
        all_models = [model] if model is not None else list(models)
        all_optimizers = [optimizer] if optimizer is not None else list(optimizers)
        if any(is_sharded(m) for m in all_models):
            raise ValueError(ONE_SHARDED)
        replica = self.parts.replica
        replica.check_fits(all_models)
        replica.wrap(all_models, all_optimizers)
        self.parts.order.least_samples = replica.least_samples
        for one in all_optimizers:
            self._take_steps(one)
        self._take_schedulers(schedulers)
        for module in all_models:
            mark_inputs_dynamic(module)
        outside = self.parts.session.outside_shoal
        if replica.on_gpu and not outside:
            self.parts.session.use_gpu()
        replica.synchronize(
            bucket_mib, self.parts.loop.end_of_backward, self.parts.steps.part_done, later=outside
        )
        return (model or all_models), (optimizer or all_optimizers)

    def mesh(self) -> Any:
        """The mesh for a script that calls torch's `fully_shard` itself: `fully_shard(layer, mesh=job.mesh())`."""
        return self._elastic_mesh().mesh

    def shard(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedulers: Sequence[Any] = (),
        layers: Any = None,
        group: int | None = None,
        copy_every: int | None = None,
        **options: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard a model (FSDP2) and make it elastic. Returns the same objects.

        `layers`: the modules that are gathered one at a time, or their class; by default the elements of every
        `nn.ModuleList`. `group`: shard it over so many workers; the job has a multiple of them, and each group has the
        whole model. Without it, the model is sharded over all workers. Then `copy_every` keeps a copy of each worker's
        rows at its neighbour, renewed every so many steps. `schedulers` travel by themselves. `options` go to torch's
        `fully_shard` (`mp_policy`, `reshard_after_forward`).
        """
        check_sharding(group, copy_every)
        parts = self.parts
        parts.replica.check_empty(shards=True)
        parts.replica.check_fits([model])
        mesh = self._elastic_mesh()  # checks the version of torch before its private parts are imported
        from shoal.torch.sharding.begin import begin_sharded

        begin_sharded(
            mesh, model, optimizer, layers, options, group, copy_every,
            parts, self.meter.note, self._checked,
        )  # fmt: skip
        self._take_steps(optimizer)
        self._take_schedulers(schedulers)
        return model, optimizer

    def _elastic_mesh(self) -> Any:
        if self._mesh is None:
            check_version()
            from shoal.torch.sharding.elastic import ElasticMesh  # private parts of torch, checked above

            self._mesh = ElasticMesh(self.parts.session)
        return self._mesh

    def _take_schedulers(self, schedulers: Sequence[Any]) -> None:
        self.state.own.update({f"scheduler {i}": scheduler for i, scheduler in enumerate(schedulers)})

    def _take_steps(self, optimizer: torch.optim.Optimizer) -> None:
        steps, original, unknown = self.parts.steps, optimizer.step, self._unknown

        def step(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            with unknown.known_step():
                return steps.optimizer_step(this, original, *args, **kwargs)

        if getattr(original, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler looks for its mark
        # Bound to the optimizer: learning-rate schedulers wrap it in turn and expect a method.
        optimizer.step = types.MethodType(step, optimizer)

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        lr_rule: str = "linear",
        warmup_steps: int = 20,
        accumulate: int = 1,
        shuffle: bool | None = None,
        drop_last: bool = False,
        sampler: Any = None,
        loss: str | None = None,
        weight: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """The training data. `batch_size` is that of all workers together; `options` go to torch's DataLoader.

        Args:
            sampler: yields the indices of an epoch, the same on every worker.
            loss: `"sum"` if the loss is a sum over the samples, or divided by what all workers have together. By
                default it is taken for a mean, and a sum is refused where it can be seen.
            weight: what a batch counts, if the loss is a mean over something other than samples: its tokens, for
                example. With `accumulate` the gradient is then that of the mean over all tokens of the step, so do not
                divide the loss by `accumulate`.
        """
        if self.parts.order.has_loader:
            raise RuntimeError("a job has one training loader; use job.eval_loader(...) to evaluate")
        if accumulate > 1 and self.parts.replica.several:
            raise ValueError("accumulate is not supported with several optimizers: use a larger batch_size")
        check_options(options)
        if shuffle and sampler is not None:
            raise ValueError("give either shuffle or a sampler")
        return Loader(
            self.parts.loop,
            self.parts.order,
            self.meter,
            dataset,
            BatchRule(batch_size, max_batch_size, lr_rule, warmup_steps),
            accumulate=accumulate,
            shuffle=shuffle is not False,
            drop_last=drop_last,
            sampler=sampler,
            loss=loss,
            weight=weight,
            num_workers=num_workers,
            collate_fn=collate_fn,
            resizes=not self.parts.session.outside_shoal,
            **options,
        )

    def eval_loader(self, dataset: Any, batch_size: int, **options: Any) -> EvaluationLoader:
        """Data to evaluate on. Each worker gets its part, in batches of `batch_size`; nothing is trained.

        `options` (`num_workers`, `collate_fn`, ...) go to torch's DataLoader.
        """
        parts = self.parts
        return EvaluationLoader(
            parts.session,
            parts.meeting,
            lambda: parts.replica.sharded is not None,
            dataset,
            batch_size,
            **options,
        )

    def evaluate(
        self,
        loader: EvaluationLoader,
        step: Callable[[Any], Any],
        weight: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Go through a `job.eval_loader` with all workers: the mean of `step(batch)`, the same on every worker.

        `step` returns the mean over its batch: a number, a tensor, or a dictionary or tuple of them. It runs without
        gradients; call `model.eval()` yourself. `weight` is what a batch counts, if that is not its samples.
        The result is exact at any number of workers. If a worker dies, its part goes to the others.
        """
        return loader.mean(step, weight)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to do, wherever the job stands."""
        if count < 1:
            raise ValueError(f"epochs must be at least 1, not {count}")
        with self._unknown.refused():
            yield from self.parts.loop.epochs(count)

    def finish(self) -> None:
        """End the training before its last epoch. All workers must call it after the same step.

        What follows in the script belongs to each worker alone. `job.epochs` calls it after its last epoch.
        """
        self.parts.loop.finish()

    # What the workers know together. Every worker must call these at the same point.

    def sum(self, value: Any) -> Any:
        """The sum of all workers' values: numbers, or tensors of one shape."""
        return sum_of(self.parts.meeting.exchange_of_script("job.sum", lambda: value, parts=True), value)

    def mean(self, value: Any, weight: Any = None) -> Any:
        """The mean of all workers' values: numbers, or tensors of one shape.

        `weight` is what this worker's value counts, by default: in a step, its part of the present batch or micro-batch
        (in samples, or in what the loader's `weight` counts); after a pass over a `job.eval_loader`, the samples that
        it had there.
        """
        mine = float(weight) if weight is not None else self._weight_of_mean()
        return mean_of(
            self.parts.meeting.exchange_of_script("job.mean", lambda: (mine, value), parts=True), value
        )

    def any(self, flag: Any) -> bool:
        """Whether the flag is true on any worker."""
        return any(self.parts.meeting.exchange_of_script("job.any", lambda: bool(flag)))

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in the order of ranks. Values may differ in size."""
        return self.parts.meeting.exchange_of_script("job.gather", lambda: value, parts=True)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value. Give a function to let only rank 0 compute it: `job.broadcast(lambda: evaluate(model))`.

        If rank 0 dies in it, another worker computes the value; without a function, that worker's own value is used.
        """
        made: list[Any] = []
        session = self.parts.session
        rank = session.rank

        def make() -> Any:
            if session.rank != 0 and not self.parts.meeting.is_alone:
                return None
            if rank != 0 and value is None:
                raise RuntimeError("rank 0 died with its value: give job.broadcast a function that makes it")
            if not made:
                made.append(value() if callable(value) else value)
            return made[0]

        return self.parts.meeting.exchange_of_script("job.broadcast", make)[0]

    def weigh(self, amount: Any) -> None:
        """What this worker's gradient of this step counts, in relation to the others': its tokens, for example.

        Call it on every worker, before the step's first `backward()`. It is for a loss that is a mean over what this
        worker has in the whole step.
        """
        self.parts.steps.weigh(float(amount))

    def _weight_of_mean(self) -> float:
        """Of the last pass over an evaluation loader if it came after the last batch, otherwise of that batch."""
        evaluated = self.parts.meeting.evaluated_samples
        if evaluated is not None:
            return float(evaluated)
        amount = self.parts.steps.amount_of_value
        return amount if amount is not None else 1.0

    def log(self, **values: Any) -> None:
        """Values to report (the last of each is kept): numbers, or tensors of one element.

        What is logged in a step is the mean over the workers, also of whole numbers and flags. What is logged outside
        of one is the value of rank 0.
        """
        if self.parts.steps.counts:
            for name, value in values.items():
                self.parts.steps.log(name, value)

    def checkpoint(self, path: str | Path | None = None) -> bool:
        """Save the whole state at rank 0, completely or not at all. False if it could not be written."""
        return self.parts.checkpoints.save(path)
