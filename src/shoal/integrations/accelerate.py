"""Accelerate on Shoal: `prepare(accelerator, ...)` instead of `accelerator.prepare(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    from accelerate.utils import send_to_device

    import shoal.torch as shoal
except ImportError as error:  # accelerate or torch
    raise ImportError(f"{error}: pip install accelerate torch") from error

from shoal.integrations.dataloaders import training_loader


def prepare(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, *schedulers: Any, seed: int = 0
) -> tuple[Any, ...]:
    """Returns the job, and the model, the optimizer, the training loader and the schedulers, prepared.

    The batches of `loader` are those of all workers together. Accelerate believes that there is one process.
    """
    job = shoal.init(seed=seed)  # first: from now on an error is the job's reason to fail
    if accelerator.num_processes > 1:
        raise ValueError("start the script with `shoal run`, and not with `accelerate launch`")
    if accelerator.gradient_accumulation_steps > 1:
        raise ValueError(
            "leave out gradient_accumulation_steps: a batch of the loader is split over the workers. If a part is "
            "still too large, use job.wrap and job.loader(..., accumulate=n), see docs/frameworks.md"
        )
    job.wrap(model, optimizer, schedulers=schedulers)
    if accelerator.scaler is not None:
        job.state["scaler"] = accelerator.scaler
    batches = _OnDevice(training_loader(job, loader), accelerator.device)
    model, optimizer, *prepared = accelerator.prepare(model, optimizer, *schedulers)
    return job, model, optimizer, batches, *prepared


class _OnDevice:
    """As the loaders that Accelerate prepares: its batches are on the worker's GPU."""

    def __init__(self, loader: Any, device: Any) -> None:
        self._loader, self._device = loader, device
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield send_to_device(batch, self._device)
