"""The DataLoader of a script as that of a job."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from shoal.torch.job import Job
from shoal.torch.loader import Loader


def options_of(dataloader: Any) -> dict[str, Any]:
    """How it reads the data. Raise ValueError if Shoal cannot split them."""
    if not isinstance(dataloader, DataLoader):
        raise ValueError(
            f"give a torch DataLoader, not a {type(dataloader).__name__}: Shoal splits its data set"
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise ValueError("an IterableDataset has no length, which Shoal needs to split it: make a list of it")
    if type(dataloader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "a batch_sampler of your own is not supported: give batch_size, and a sampler if needed"
        )
    return {
        "num_workers": dataloader.num_workers,
        "collate_fn": dataloader.collate_fn,
        "pin_memory": dataloader.pin_memory,
    }


def training_loader(job: Job, dataloader: Any, accumulate: int = 1) -> Loader:
    """Its batches are those of all workers together."""
    options = options_of(dataloader)
    sampler: Any = dataloader.sampler
    usual = isinstance(sampler, (RandomSampler, SequentialSampler))
    order = {"shuffle": isinstance(sampler, RandomSampler)} if usual else {"sampler": sampler}
    if not options["num_workers"]:
        options.pop("pin_memory")
    return job.loader(
        dataloader.dataset,
        dataloader.batch_size,
        accumulate=accumulate,
        drop_last=dataloader.drop_last,
        **order,
        **options,
    )
