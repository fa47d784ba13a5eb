"""A script's own sampler: the order of each epoch, the same on every worker and after every restart."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from shoal.torch.state import random_state, seed_all, set_random_state


class SeededSampler:
    """The indices of an epoch. Random numbers that the sampler draws depend on the job's seed and the epoch only."""

    def __init__(self, sampler: Any, seed: int) -> None:
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "leave out the DistributedSampler: the job splits each batch over its workers itself"
            )
        if not hasattr(sampler, "__len__"):
            raise ValueError("the sampler needs a length: define __len__")
        self._sampler, self._seed = sampler, seed

    def __call__(self, epoch: int) -> list[int]:
        before = random_state(cuda=False)
        seed_all(self._seed * 1_000_003 + epoch)
        generator = getattr(self._sampler, "generator", None)
        if generator is not None:
            generator.manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        try:
            indices = [int(i) for i in self._sampler]
        finally:
            set_random_state(before)
        if len(indices) != len(self._sampler):
            raise RuntimeError(
                f"the sampler gave {len(indices)} indices in epoch {epoch}, and its length is {len(self._sampler)}: "
                "every epoch must have as many"
            )
        return indices
