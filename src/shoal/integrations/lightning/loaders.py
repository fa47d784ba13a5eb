"""The DataLoaders of a Lightning script as those of a job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from shoal.integrations.dataloaders import options_of, training_loader
from shoal.integrations.lightning.progress import follow
from shoal.torch.job import Job

MANY_EPOCHS = 1 << 30
"""For a Trainer that has no limit and is stopped."""


class TrainingBatches:
    """This worker's part of each batch. Before each one the Trainer's counters are set to where the job is."""

    def __init__(self, dataloader: Any, trainer: Any, job: Job, begin: Callable[[], None]) -> None:
        self._trainer, self._job, self._begin = trainer, job, begin
        self._loader = training_loader(job, dataloader, trainer.accumulate_grad_batches)
        self.dataset, self.batch_size = dataloader.dataset, dataloader.batch_size
        self._epochs = job.epochs(self._most_epochs())

    def _most_epochs(self) -> int:
        trainer = self._trainer
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else MANY_EPOCHS
        if trainer.max_steps > 0:
            steps = -(-len(self) // trainer.accumulate_grad_batches)
            epochs = min(epochs, -(-trainer.max_steps // steps))
        return int(epochs)

    def __len__(self) -> int:
        """The batches of an epoch; each worker has a part of every one."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = next(self._epochs, None)
        if epoch is not None and self._job.rehearsing:
            yield from self._rehearse()
            epoch = next(self._epochs, None)
        if epoch is None:
            return  # the job was resumed after its last epoch, and the Trainer does not know
        micro = 0
        for batch in self._loader:
            # Otherwise the Trainer stops after so many batches, and a step that has to be done again is lost.
            self._trainer.fit_loop._data_fetcher.length = sys.maxsize
            self._begin()
            follow(self._trainer, self._job, micro)
            micro = 0 if self._job.stepping else micro + 1
            yield batch

    def end(self) -> None:
        """The Trainer has ended. If nobody stopped it, the job is complete."""
        if not self._trainer.should_stop:
            next(self._epochs, None)

    def _rehearse(self) -> Iterator[Any]:
        """A newcomer runs one step before it joins. `VoidSteps` sees to it that nothing of it counts."""
        for batch in self._loader:
            self._trainer.fit_loop._data_fetcher.length = sys.maxsize
            yield batch


class ValidationBatches:
    """This worker's part of the validation data. It has no length: that changes with the number of workers.

    `limit` is the Trainer's `limit_val_batches`. Its batches are those that one process would have.
    """

    def __init__(self, dataloader: Any, job: Job, limit: int | float = 1.0) -> None:
        options = options_of(dataloader)
        if not isinstance(dataloader.sampler, RandomSampler | SequentialSampler):
            raise ValueError(
                "a sampler of your own is not supported for validation: use a torch.utils.data.Subset of the data"
            )
        self.dataset = _first_batches(dataloader, limit)
        self._loader = job.eval_loader(self.dataset, dataloader.batch_size, **options)
        self._fillers = DataLoader(Subset(self.dataset, [0]), **options)
        #: Whether the present batches are this worker's part of the data.
        self.counts = True

    def __iter__(self) -> Iterator[Any]:
        """A worker without a part gets a batch that does not count: every worker must know every metric."""
        self.counts = False
        for batch in self._loader:
            self.counts = True
            yield batch
        if not self.counts:
            yield from self._fillers


def _first_batches(dataloader: Any, limit: int | float) -> Any:
    """The data of so many batches, or of this fraction of them."""
    dataset = dataloader.dataset
    if limit == 1.0 and isinstance(limit, float):
        return dataset
    whole = len(dataloader)
    batches = int(whole * limit) if isinstance(limit, float) else min(whole, limit)
    if not batches:
        raise ValueError(
            f"limit_val_batches={limit} of {whole} batches is no batch: give a number of batches"
        )
    return Subset(dataset, range(min(len(dataset), batches * dataloader.batch_size)))
