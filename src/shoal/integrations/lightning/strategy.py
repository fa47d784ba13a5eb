"""A Lightning strategy whose workers change while they train.

    from shoal.integrations.lightning import ShoalStrategy

    trainer = Trainer(strategy=ShoalStrategy(), devices=1, max_epochs=10)
    trainer.fit(module, train_loader, val_loader)

Each worker's Trainer believes that it is alone; Shoal's runtime splits each batch and adds the gradients. The batch
size of the training DataLoader is that of all workers together. Metrics of an epoch, and torchmetrics, are those of
all workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import shoal.torch as shoal
import torch
from shoal.integrations.lightning.loaders import TrainingBatches, ValidationBatches
from shoal.integrations.lightning.metrics import nothing_counts, reduce_epochs, reduced, share_metrics
from shoal.integrations.lightning.progress import VoidSteps
from shoal.integrations.lightning.state import TravellingState
from torch import Tensor

AVERAGING = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(callbacks, name)  # Lightning 2.5 has only the first
)


class ShoalStrategy(SingleDeviceStrategy):
    def __init__(self, *, job: shoal.Job | None = None, seed: int = 0, **options: Any) -> None:
        self.job = job or shoal.init(seed=seed)
        #: The workers train together: from the first batch to the end of training.
        self._together = False
        self._in_training_step = False
        self._limit_val_batches: int | float | None = None
        options.setdefault("device", "cuda:0" if torch.cuda.is_available() else "cpu")
        super().__init__(**options)

    # Set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_rank()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # Shoal splits the data
        if trainer.state.fn != TrainerFn.FITTING:
            return
        _check(trainer)
        self._take_limit(trainer)
        model, optimizers, job = self.model, self.optimizers, self.job
        if len(optimizers) == 1:
            job.wrap(model, optimizers[0])
        else:
            job.wrap(models=[model], optimizers=optimizers)
        for index, config in enumerate(self.lr_scheduler_configs):
            job.state[f"scheduler {index}"] = config.scheduler
        job.state["trainer"] = TravellingState(trainer, job)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            job.state["scaler"] = scaler
        trainer.callbacks.insert(0, VoidSteps(job))
        share_metrics(self.lightning_module, job, lambda: self._together)
        epoch_loop = trainer.fit_loop.epoch_loop
        reduce_epochs(epoch_loop._results)
        reduce_epochs(epoch_loop.val_loop._results)

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._trainer()
        if trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if trainer.training:
            return TrainingBatches(dataloader, trainer, self.job, self._begin)
        limit = self._limit_val_batches
        return ValidationBatches(dataloader, self.job, 1.0 if limit is None else limit)

    def _take_limit(self, trainer: Trainer) -> None:
        """The Trainer would count the batches of this worker. The limit is on those of one process."""
        if trainer.limit_val_batches:  # 0 leaves out the validation, which the Trainer has to know
            self._limit_val_batches, trainer.limit_val_batches = trainer.limit_val_batches, 1.0

    def teardown(self) -> None:
        if self._limit_val_batches is not None:
            self._trainer().limit_val_batches = self._limit_val_batches  # for `trainer.validate`
            self._limit_val_batches = None
        super().teardown()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._trainer().state.fn == TrainerFn.FITTING:
            raise ValueError(
                "leave out ckpt_path: a job that is resumed or restarted continues by itself, from the state that "
                "Shoal keeps"
            )
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return found

    def _trainer(self) -> Trainer:
        module = self.lightning_module
        assert module is not None
        return module.trainer

    # Training

    def _begin(self) -> None:
        """Before each batch."""
        self._together = True
        self._set_rank()

    def _set_rank(self) -> None:
        """Lightning's loggers write on rank 0 only. Which worker that is may change. In a void step it is none."""
        rank_zero_only.rank = 0 if self.is_global_zero else 1

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The closure runs the forward and backward passes. It ends before the step, as the others wait for it."""
        if getattr(self.precision_plugin, "scaler", None) is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # it does so, too
        module = model or self.lightning_module
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        if result is None and isinstance(module, LightningModule) and module.automatic_optimization:
            raise RuntimeError(
                "training_step returned None: the other workers wait for this batch. To leave it out, return its loss "
                "multiplied by 0"
            )
        optimizer.step(**kwargs)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_training_step = True
        try:
            with self._counting(self._has_part):
                return super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer()
        counts = True
        if trainer.state.fn == TrainerFn.FITTING:
            loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader
            assert loaders is not None
            assert trainer._results is not None
            counts = loaders.flattened[trainer._results.dataloader_idx or 0].counts
        with self._counting(counts):
            return super().validation_step(*args, **kwargs)

    def _counting(self, counts: bool) -> AbstractContextManager[None]:
        return nullcontext() if counts else nothing_counts(self._trainer()._results, self.lightning_module)

    @property
    def _has_part(self) -> bool:
        """Whether this worker has samples of the present batch. If not, it computes on others' to take part."""
        steps = self.job.parts.steps
        return bool(steps.amount_of_value) and not steps.is_void and not self.job.rehearsing

    def on_train_end(self) -> None:
        self._together = False
        loader = self._trainer().fit_loop._combined_loader
        for batches in loader.flattened if loader is not None else []:
            batches.end()
        self.job.finish()

    # What the workers decide together

    @property
    def is_distributed(self) -> bool:
        """Lightning ignores `sync_dist=True` unless this is true."""
        return True

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_main

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return reduced(self.job, tensor, reduce_op, self._in_training_step) if self._together else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._together:
            return decision
        return not self.job.any(not decision) if all else self.job.any(decision)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self._together:
            self.job.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.job.broadcast(obj) if self._together else obj

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack(self.job.gather(tensor)) if self._together else tensor


def _check(trainer: Trainer) -> None:
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        raise ValueError(
            "limit_train_batches and overfit_batches are not supported: use a torch.utils.data.Subset of the data"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "reload_dataloaders_every_n_epochs is not supported: a job has one training loader. For data that differ "
            "between epochs define set_epoch(epoch) in a sampler"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, AVERAGING):
            raise ValueError(
                f"leave out {type(callback).__name__}: a new worker would not know its averaged model. Average the "
                "checkpoints of ModelCheckpoint(save_top_k=-1) after the training"
            )
