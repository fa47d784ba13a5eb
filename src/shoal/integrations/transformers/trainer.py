"""A `Trainer` whose workers change while it trains.

    from shoal.integrations.transformers import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=args, train_dataset=dataset, ...)
    trainer.train()

Each worker's Trainer believes that it is alone; Shoal's runtime splits each batch and adds the gradients.
`per_device_train_batch_size * gradient_accumulation_steps` is the batch of all workers together, so the training is
that of one process with the same arguments, whatever the number of workers. The Trainer's own state (steps, logged
losses, best metric, callbacks) travels with the job.

The Trainer counts batches to know when a step and an epoch end. That does not hold here: a step may be done again, and
a newcomer begins in the middle of an epoch. So the Trainer gets all micro-batches of a step as one batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainingArguments

import shoal.torch as shoal
import torch
from shoal.integrations.transformers.checks import check_arguments, check_model
from shoal.integrations.transformers.evaluation import evaluate_together, has_length
from shoal.integrations.transformers.state import TravellingState
from shoal.integrations.transformers.step_loss import StepLoss
from shoal.integrations.transformers.tracking import SameRun


class ElasticTrainer(Trainer):
    """`max_batch_size` lets the batch grow with the workers up to this many samples, see `job.loader`."""

    control: Any
    model_accepts_loss_kwargs: bool

    def __init__(
        self, *args: Any, job: shoal.Job | None = None, max_batch_size: int | None = None, **kwargs: Any
    ) -> None:
        arguments = kwargs.get("args") or (args[1] if len(args) > 1 else TrainingArguments())
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        self.job = job or shoal.init(seed=seed)  # first: from now on an error is the job's reason to fail
        check_arguments(arguments)
        super().__init__(*args, **kwargs)
        check_model(self.model)
        self.callback_handler.callbacks.insert(0, SameRun(self.callback_handler))
        self._max_batch_size = max_batch_size
        self._loss = StepLoss(self.job)
        self._steps_in_epoch = 0
        self._accumulate = self.args.gradient_accumulation_steps
        self._in_epochs = False
        #: The callbacks know that this worker is rank 0: their `on_train_begin` was called as such.
        self._began_as_main = False

    # The data

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset")
        args = self.args
        dataset, collate = self.train_dataset, self.data_collator
        if type(dataset).__module__.startswith("datasets."):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        order: dict[str, Any] = {"shuffle": args.train_sampling_strategy == "random"}
        if args.train_sampling_strategy not in ("random", "sequential"):
            order = {"sampler": self._get_train_sampler(dataset)}
        loader = self.job.loader(
            dataset,
            args.per_device_train_batch_size,
            max_batch_size=self._max_batch_size,
            accumulate=self._accumulate,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            collate_fn=collate,
            **order,
        )
        return _WholeSteps(loader, self._accumulate, self.job)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The micro-batches of a step, as one batch, and what its loss is divided by."""
        micro_batches = next(epoch_iterator, None)
        if micro_batches is None:
            self.control.should_epoch_stop = True
            return [], None
        state, job = self.state, self.job
        self._steps_in_epoch += 1
        state.global_step = job.position.step
        state.is_world_process_zero = state.is_local_process_zero = job.is_main
        if job.is_main and not self._began_as_main:
            self._take_over()
        is_mine = self._loss.begin_step(len(micro_batches))
        mine = [b for b, counts in zip(micro_batches, is_mine, strict=True) if counts]
        items = self._get_num_items_in_batch(mine or micro_batches, device)
        if items is not None:
            self._loss.weigh(float(items) if mine else 0.0)
        else:
            self._weigh_means(micro_batches, is_mine)
        return [micro_batches], items

    def _weigh_means(self, micro_batches: list[Any], is_mine: list[bool]) -> None:
        """The model takes no `num_items_in_batch`. Its loss is the mean over the tokens that it gets."""
        if getattr(self, "loss_is_scaled_for_ga", None):
            return
        takes, self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs, True
        try:
            items = [self._get_num_items_in_batch([one], torch.device("cpu")) for one in micro_batches]
        finally:
            self.model_accepts_loss_kwargs = takes
        if None not in items:
            self._loss.weigh_means(
                [float(n) if mine else 0.0 for n, mine in zip(items, is_mine, strict=True)]
            )

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(super(ElasticTrainer, self).floating_point_ops(one) for one in inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for one in inputs:
            super()._track_num_input_tokens(one)

    # Training

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        self.job.wrap(self.model, optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.job.state["scheduler"] = scheduler
        self.job.state["trainer"] = TravellingState(self)
        if self.accelerator.scaler is not None:
            self.job.state["scaler"] = self.accelerator.scaler
        return scheduler

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            raise ValueError(
                "leave out resume_from_checkpoint: a job that is resumed or restarted continues by itself, from the "
                "state that Shoal keeps (outside Shoal: shoal.init(checkpoint=...), passed as ElasticTrainer(job=...))"
            )
        self.args.gradient_accumulation_steps = 1
        try:
            return super().train(**kwargs)
        finally:
            self.args.gradient_accumulation_steps = self._accumulate

    def _run_epoch(self, *, model: Any, epoch: int, **given: Any) -> None:
        """All epochs that are still to do: the job, and not the Trainer's loop, knows which these are."""
        given["num_update_steps_per_epoch"] = sys.maxsize  # the end of the data ends an epoch
        begun, self._began_as_main = True, self.state.is_world_process_zero
        for at in self.job.epochs(self.state.num_train_epochs):
            if self.job.rehearsing:
                self._rehearse(model, given["train_dataloader"])
                continue
            self._in_epochs = True
            if not begun:
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            self._steps_in_epoch, begun = 0, False
            super()._run_epoch(model=model, epoch=at, **given)
            if not self._steps_in_epoch:
                self.control.should_training_stop = False  # this worker joined at the end of the epoch
            if self.control.should_training_stop and not self._is_complete(at):
                break
        self._in_epochs = False
        self.job.finish()
        self.control.should_training_stop = True

    def _is_complete(self, epoch: int) -> bool:
        """The Trainer also stops after its last step. That is not to be reported as an early end."""
        state = self.state
        return state.global_step >= state.max_steps and epoch + 1 >= state.num_train_epochs

    def _take_over(self) -> None:
        """The callbacks begin once more. On rank 0 they open what only rank 0 writes: W&B's run, a progress bar."""
        self._began_as_main = True
        for callback in self.callback_handler.callbacks:
            if getattr(callback, "_initialized", False):  # trackers, which would skip their set-up
                callback._initialized = False
        self.callback_handler.call_event("on_train_begin", self.args, self.state, self.control)

    def _rehearse(self, model: Any, loader: Any) -> None:
        """A newcomer runs one step before it joins. Nothing of it counts, so no callback is called."""
        for micro_batches in loader:
            self.training_step(model, micro_batches)
        self.optimizer.step()
        model.zero_grad()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The forward and backward passes of all micro-batches. Returns the loss of the step over all workers."""
        total = None
        for one in inputs:
            factor = self._loss.factor
            self.current_gradient_accumulation_steps = len(inputs) / factor if factor else math.inf
            loss = super().training_step(model, one, num_items_in_batch)
            total = self._loss.add(loss)
        if total is None or self.job.parts.steps.is_void:
            return torch.zeros_like(loss)
        return torch.full_like(loss, total)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.job.parts.steps.is_void:
            return  # the step is done again, or this worker joins again
        position, length = self.job.parts.steps.position, self.job.parts.order.batches.length
        if length:
            self.state.epoch = position.epoch + min(position.cursor / length, 1.0)
        evaluates = self.control.should_evaluate
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if evaluates:  # a newcomer that receives the state does not know yet what its callbacks have seen
            self.control.should_training_stop = self.job.any(self.control.should_training_stop)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._in_epochs:
            # durations differ between the workers, and the history is the job's
            logs |= self.job.broadcast(logs)
        super().log(logs, *args, **kwargs)
        self.job.log(**{k: v for k, v in logs.items() if isinstance(v, float)})

    # Saving and evaluating

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Only rank 0 saves, or another worker if rank 0 dies in it. All learn which checkpoint is the best."""

        def save() -> str | None:
            super(ElasticTrainer, self)._save_checkpoint(model, trial)
            return self.state.best_model_checkpoint

        self.state.best_model_checkpoint = self.job.broadcast(save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.job.is_main:
            super().save_model(output_dir, _internal_call)

    def is_world_process_zero(self) -> bool:
        return self.job.is_main

    def is_local_process_zero(self) -> bool:
        return self.job.is_main

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """While the job trains, all workers evaluate: each has some of the batches that one process would have."""
        if not self._in_epochs or not has_length(dataloader):
            return super().evaluation_loop(dataloader, description, *args, **kwargs)
        return evaluate_together(self, dataloader, *args, **kwargs)


class _WholeSteps:
    """The job's loader: yields all micro-batches of a step at once."""

    def __init__(self, loader: Any, accumulate: int, job: shoal.Job) -> None:
        self._loader, self._accumulate, self._job = loader, accumulate, job
        self.dataset, self.batch_size = loader.dataset, loader.rule.batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        drawn: list[Any] = []
        for batch in self._loader:
            drawn.append(batch)
            if self._job.stepping:
                yield drawn
                drawn = []

    def __len__(self) -> int:
        return -(-len(self._loader) // self._accumulate)
