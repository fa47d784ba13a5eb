"""Small numbers that travel with the gradients, in the all-reduce that each step has anyway.

They cost no message of their own: where each worker is in the data (so that workers that have come apart are found at
once), its learning rates, a hash of its `job.state`, what its gradient counts (tokens, for example), and what the
script has logged.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

PLACES = 4093
"""Sums of places, of up to 4,095 workers, are exact in float32."""
HASHES = (251, 241)
"""Sums of the squares of the rests, of up to 256 workers, are exact in float32."""
HEAD = 5 + 2 * len(HASHES)
LOGS = 16
"""Logged values that are averaged in one step. With more of them, they take turns."""
WIDTH = HEAD + 3 * LOGS


class Aside:
    """What this worker adds (`place`, `amount`, logged values), and the sums over all of them (`total`, `means`)."""

    def __init__(self) -> None:
        self.place = self.rates = self._turn = 0
        self._state: tuple[float, ...] = (0.0,) * (2 * len(HASHES))
        #: The workers had different values in `job.state` before this step. All get the same answer.
        self.states_differ = False
        #: Whether this worker must be where the others are. A newcomer that receives the state need not be.
        self.checks = True
        #: What this worker's gradient counts in this step. None: samples, whose share is known beforehand.
        self.amount: float | None = None
        #: The sum of all workers' amounts. 0.0 if gradients are weighted by samples.
        self.total = 0.0
        self.means: dict[str, float] = {}
        self._logged: dict[str, tuple[Any, float]] = {}
        self._sent: tuple[str, ...] = ()

    def set_place(
        self, place: tuple[int, ...], rates: tuple[float, ...], state: int = 0, turn: int = 0
    ) -> None:
        """Where this worker is in the data, its learning rates, a hash of its `job.state`: the same on all.

        With the learning rates goes whether it applied the last optimizer step.
        `turn`: of more logged values than fit, which ones are sent.
        """
        self.place, self.rates = hash(place) % PLACES, hash(rates) % PLACES
        rests = [float(state % h) for h in HASHES]
        self._state, self._turn = (*rests, *(r * r for r in rests)), turn

    def log(self, name: str, value: Any, weight: float) -> None:
        """A value of this worker's part of a step, to be averaged in the next all-reduce."""
        self._logged[name] = (value, weight)

    def never_averaged(self) -> dict[str, Any]:
        """This worker's values of names that no all-reduce has taken: those logged only in the last step."""
        return {name: value for name, (value, _) in self._logged.items() if name not in self.means}

    def write(self, out: Tensor) -> None:
        """This worker's numbers, before they are summed."""
        out.zero_()
        weighs = self.amount is not None
        amount = self.amount if self.amount is not None else 0.0
        out[:HEAD] = torch.tensor([1.0, self.place, self.rates, amount, weighs, *self._state])
        self._sent = self._next_names()
        for index, name in enumerate(self._sent):
            value, weight = self._logged.pop(name)
            if weight:
                place = HEAD + 3 * index
                out[place : place + 2] = torch.tensor([weight, weight * _code(name)])
                out[place + 2] = value * weight

    def _next_names(self) -> tuple[str, ...]:
        """The names whose turn it is: the same on all workers, if they log the same."""
        names = sorted(self._logged)
        if len(names) <= LOGS:
            return tuple(names)
        begin = self._turn * LOGS % len(names)
        return tuple((names + names)[begin : begin + LOGS])

    def read(self, sums: Tensor) -> None:
        """The sums over all workers."""
        numbers = sums.tolist()
        workers, places, rates, total, weighers, *states = numbers[:HEAD]
        # All values are equal exactly if n times the sum of the squares is the square of the sum.
        pairs = zip(states[: len(HASHES)], states[len(HASHES) :])
        self.states_differ = any(workers * squares != sum_ * sum_ for sum_, squares in pairs)
        if self.checks and rates != workers * self.rates:
            raise RuntimeError(
                "the learning rates differ between the workers, or optimizer.step() was left out on some of them: pass "
                "schedules to job.wrap(..., schedulers=[...]), and step them and the optimizer on every worker, by the "
                "same numbers: job.mean(x), job.broadcast(x)"
            )
        if self.checks and places != workers * self.place:
            raise RuntimeError(
                "the workers are at different batches: the script has left its loop over the loader (by `break`, for "
                "example), or has run another number of backward passes, on some workers only. Let all decide "
                "together: if job.any(flag): break"
            )
        if weighers not in (0.0, workers):
            raise RuntimeError(
                f"job.weigh() was called on {weighers:.0f} of {workers:.0f} workers: call it in every step on all"
            )
        self.total = total
        for index, name in enumerate(self._sent):
            weight, codes, value = numbers[HEAD + 3 * index : HEAD + 3 * index + 3]
            # Another name in its place: not all workers have logged the same values.
            if weight and abs(codes / weight - _code(name)) < 0.5:
                self.means[name] = value / weight
        self._sent = ()


def _code(name: str) -> int:
    return zlib.crc32(name.encode()) % 1021
