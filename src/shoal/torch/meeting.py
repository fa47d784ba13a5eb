"""What the script exchanges between the workers: one value of each, received by all.

A worker may die while an exchange is under way. So each ends with a vote, as a step does: it completes only if every
member has received everything. After a break, the survivors compare how many exchanges each has completed. If one has
completed the present exchange, all others have received it and use it; otherwise all do it again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import AllreduceOptions, ReduceOp

import torch
from shoal.torch.packing import as_bytes, dumps
from torch import Tensor

FRAME_BYTES = 256
"""The first message of each member: its size, and all of it if it is small."""
SIZE_BYTES = 8
GENERATION_BITS = 24
ABSENT = b""


class Members(Protocol):
    """Who takes part: a `Session`."""

    @property
    def name(self) -> str: ...

    @property
    def joined(self) -> bool: ...

    @property
    def retreated(self) -> bool: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def partial(self) -> bool: ...

    @property
    def meet_group(self) -> Any: ...

    def wait(self, work: Any) -> bool: ...

    def exchanges(self) -> None: ...


class Progress(Protocol):
    """Where the training is: `Steps`."""

    @property
    def rehearsing(self) -> bool: ...

    @property
    def is_void(self) -> bool: ...

    @property
    def observes(self) -> bool: ...


class Meeting:
    """`halt` makes this worker continue in the generation of the survivors, `meet` checks that all are here."""

    def __init__(
        self,
        members: Members,
        steps: Progress,
        halt: Callable[[], None],
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self._members, self._steps, self._halt, self._meet = members, steps, halt, meet
        self._mark = 0  # the generation, and how many exchanges are completed in it
        self._received: list[bytes] | None = None  # those of the present exchange, until its vote is over
        #: Samples of this worker in the last pass over an evaluation loader. None: there was none since the last batch.
        self.evaluated_samples: int | None = None
        #: The workers that had a part in that pass.
        self.evaluators: tuple[str, ...] = ()
        #: A newcomer is in the part of the script before its first batch, which the others have passed.
        self._waits_for_pass = False

    def begin_as_newcomer(self) -> None:
        self._waits_for_pass = True

    def begin_pass(self) -> None:
        self._waits_for_pass = False
        self.begin_batch()

    def begin_batch(self) -> None:
        """What follows is about a batch of the training, and not about the last evaluation."""
        self.evaluated_samples, self.evaluators = None, ()

    @property
    def is_muted(self) -> bool:
        """Nothing that this worker does now counts, so it exchanges nothing."""
        members, steps = self._members, self._steps
        return not members.joined or self._waits_for_pass or steps.rehearsing or steps.is_void

    @property
    def is_alone(self) -> bool:
        return self.is_muted or self._members.world_size == 1

    def exchange_of_script(self, point: str, make: Callable[[], Any], parts: bool = False) -> list[Any]:
        """As `exchange`, for `job.mean` and the like. `parts`: of each worker's part of the last evaluation."""
        members = self._members
        if not (members.joined or self._steps.rehearsing or members.retreated):
            raise RuntimeError(
                "before job.epochs() the workers do not know each other, and each would get its own value: call "
                "job.mean, job.sum, job.any, job.gather and job.broadcast within `for epoch in job.epochs(n)`. What "
                "follows from a seed or a file is the same on every worker anyway; job.once(name) is true on one"
            )
        found = self.exchange(point, lambda: (members.name, make()))
        missing = set(self.evaluators) - {name for name, _ in found}
        if parts and missing and not self.is_muted:
            raise RuntimeError(
                f"{', '.join(sorted(missing))} was lost after its part of the evaluation, and its result with it: use "
                "job.evaluate(loader, f), which gives that part to the others"
            )
        return [value for _, value in found]

    def exchange(self, point: str, make: Callable[[], Any]) -> list[Any]:
        """The values of all workers that have a part in the present step, in rank order.

        Every worker must call it at the same `point` of the script, which is checked. Newcomers that receive the state
        give none. `make` is called again if the members change meanwhile.
        """
        while not self.is_alone:
            absent = self._members.partial or self._steps.observes
            mine = ABSENT if absent else dumps((self._members.name, point, make()))
            received = self._gather(mine)
            if received is None:
                received = self._after_break()
            if received is not None:
                return _values([pickle.loads(value) for value in received if value != ABSENT])
        return [make()]

    def _after_break(self) -> list[bytes] | None:
        self._halt()
        received, self._received = self._received, None
        return None if self.is_muted else received

    def _gather(self, mine: bytes) -> list[bytes] | None:
        """All members' values, in rank order. None: it broke."""
        self._mark = max(self._mark, self._members.generation << GENERATION_BITS)
        self._meet()
        self._members.exchanges()
        self._received = self._swap(mine)
        if self._received is None:
            return None
        group, done = self._members.meet_group, torch.zeros(1, dtype=torch.int64)
        if not self._members.wait(group.allreduce([done])):
            return None
        received, self._received = self._received, None
        self._mark += 1
        return received

    def _swap(self, mine: bytes) -> list[bytes] | None:
        frame = len(mine).to_bytes(SIZE_BYTES, "big") + mine[: FRAME_BYTES - SIZE_BYTES]
        frames = self._all_gather(frame, FRAME_BYTES)
        if frames is None:
            return None
        sizes = [int.from_bytes(f[:SIZE_BYTES], "big") for f in frames]
        largest = max(sizes)
        if largest > FRAME_BYTES - SIZE_BYTES:
            whole = self._all_gather(mine, largest)
            return None if whole is None else [value[:size] for value, size in zip(whole, sizes)]
        return [f[SIZE_BYTES : SIZE_BYTES + size] for f, size in zip(frames, sizes)]

    def _all_gather(self, data: bytes, size: int) -> list[bytes] | None:
        mine = torch.zeros(size, dtype=torch.uint8)
        as_bytes(mine)[: len(data)] = data
        all_of_them = [torch.empty_like(mine) for _ in range(self._members.world_size)]
        if not self._members.wait(self._members.meet_group.allgather([all_of_them], [mine])):
            return None
        return [bytes(as_bytes(t)) for t in all_of_them]

    def align(self) -> bool:
        """In the generation of the survivors: whether the present exchange was completed by one. False: it broke."""
        present = self._mark + 1
        furthest: Tensor = torch.tensor([self._mark])
        if self._members.world_size > 1:
            options = AllreduceOptions()
            options.reduceOp = ReduceOp.MAX
            if not self._members.wait(self._members.meet_group.allreduce([furthest], options)):
                return False
            if int(furthest) < present:
                self._received = None
        return True


def _values(received: list[tuple[str, str, Any]]) -> list[Any]:
    """Of what the workers sent: (name, point, value). Values of different points must not be mixed."""
    if len({point for _, point, _ in received}) > 1:
        places = ", ".join(f"{name} is at {point}" for name, point, _ in received)
        raise RuntimeError(
            f"the workers are at different points: {places}. Call these on every worker, in the same order, and leave "
            "a loop over an eval_loader on all of them or on none: if job.any(flag): break"
        )
    return [value for _, _, value in received]
