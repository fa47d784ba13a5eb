"""Comparing the workers: what must be equal on all of them, at each epoch and after each change of members.

Always: learning rates, schedules, `job.state` and the order of the data, by a hash, and a few elements of each
parameter and its optimizer state (see same_weights.py). In checked mode all of them and batch-norm statistics, bit for
bit. Learning rates and plain values of `job.state` are compared in every step, too, and a hash of the weights now and
then (see aside.py). If values or weights differ, they are compared here after that step, and all get main's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.fingerprint import fingerprint, shown
from shoal.torch.meeting import Meeting
from shoal.torch.replica import Replica
from shoal.torch.same_weights import digest, first_difference, weights_of
from shoal.torch.state import OWN
from torch import Tensor


class Membership(Protocol):
    """The members whose states are compared: a `Session`."""

    @property
    def growing(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def done(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def members(self) -> tuple[str, ...]: ...

    @property
    def world_size(self) -> int: ...

    @property
    def vote_group(self) -> Any: ...

    def arrived(self, step: int) -> None: ...

    def wait(self, work: Any) -> bool: ...


LONGEST_BITS = 10
"""Values that differ in every step are given to all every 1,024 steps."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that must be equal: its fingerprint, and how it is shown in an error."""

    digest: bytes
    #: The value, or the values of a dictionary by their keys.
    texts: dict[str, str]
    #: An entry of `job.state` that is given to all if it differs, and not refused.
    key: str | None = None


class StateCheck:
    def __init__(
        self,
        session: Membership,
        replica: Replica,
        order: DataOrder,
        meeting: Meeting,
        note: Callable[[str], None],
        enabled: bool,
        own_sync: bool = False,
    ) -> None:
        self._session, self._replica, self._order = session, replica, order
        self._meeting, self._note = meeting, note
        self._enabled = enabled  # checked mode
        self._own_sync = own_sync  # the script sums the gradients itself
        self._changed = False
        self._after = -1
        self._epoch = -1
        self._told: set[str] = set()  # entries of which a note was given
        self._given = 0  # how often steps have shown a difference, since the members have changed
        self._next_look = 0

    def expect(self, after: int = -1) -> None:
        """The members have changed: compare once more than `after` steps are done and newcomers hold the state."""
        self._changed, self._after = True, after
        self._given = self._next_look = 0

    def postpone(self) -> None:
        """Compare after one more step, which finds workers that are at different batches."""
        self._after = max(self._after, self._session.done)

    def run_if_due(self) -> None:
        """Between two steps. All members reach it after the same step."""
        session, epoch = self._session, self._order.position.epoch
        due = self._changed or epoch != self._epoch or self._step_shows_difference()
        if not due or session.growing or session.done <= self._after:
            return
        changed, self._changed, self._epoch, self._after = self._changed, False, epoch, -1
        if session.world_size > 1:
            session.arrived(session.done + 1)  # it waits for the others here
            self._compare(bits=changed and self._enabled)

    def _step_shows_difference(self) -> bool:
        """The same on all members. Values that differ in every step are looked at ever less often."""
        buckets, done = self._replica.buckets, self._session.done
        if buckets is None or not buckets.aside.states_differ or done < self._next_look:
            return False
        buckets.aside.states_differ = False
        self._given += 1
        self._next_look = done + (1 << min(self._given, LONGEST_BITS))
        return True

    def _compare(self, bits: bool) -> None:
        state, size, generation = self._replica.state, self._session.world_size, self._session.generation
        digests = [fingerprint({name: entry.digest for name, entry in self._entries().items()})]
        digests.append(self._order.digest_of_sample())
        digests.append(digest(state) if self._replica.sharded is None else b"")
        if bits:
            digests.append(state.digest((self._order.position, self._order.rule)))
        equal = self._are_equal(digests)
        if equal is None:
            return  # it broke for another reason, which the next step finds
        if not equal[0]:
            self._resolve(self._meeting.exchange("a comparison of job.state", self._entries))
        if not equal[1]:
            self._tell("stream", _ADVICE_ON_STREAMS)
        if not equal[2]:
            self._check_weights()
        if bits and not equal[3]:
            raise RuntimeError(
                f"generation {generation}: the members' states differ: "
                "is all that the script keeps (schedules, scalers, averages) in job.state?"
            )
        if bits:
            self._note(f"generation {generation}: state verified bit for bit on {size} members")

    def _check_weights(self) -> None:
        state = self._replica.state
        found = self._meeting.exchange("a comparison of the weights", lambda: weights_of(state))
        where = first_difference(self._session.members, found)
        if where is None:
            return  # workers with other hardware round differently
        if state.elementwise and not self._own_sync:
            raise RuntimeError(f"{where}: {_ADVICE_ON_WEIGHTS}")
        unless = "unless the optimizer or the sync function rounds differently"
        self._tell("weights", f"{where}: {unless}, {_ADVICE_ON_WEIGHTS}")

    def _tell(self, name: str, text: str) -> None:
        """Note it once, on one worker."""
        if self._session.rank == 0 and name not in self._told:
            self._told.add(name)
            self._note(text)

    def _are_equal(self, digests: list[bytes]) -> list[bool] | None:
        """Which digests are equal on all members. None: it broke."""
        mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(torch.int64)
        # All values are equal exactly if n times the sum of the squares is the square of the sum.
        both = torch.cat([mine, mine * mine])
        if not self._session.wait(self._session.vote_group.allreduce([both])):
            return None
        total, squares = both[: len(mine)], both[len(mine) :]
        same = squares * self._session.world_size == total * total
        return [bool(part.all()) for part in same.split([len(d) for d in digests])]

    def _entries(self) -> dict[str, Entry]:
        state, box = self._replica.state, self._replica.box
        entries: dict[str, Entry] = {}
        for index, group in enumerate(state.groups()):
            for name, value in group.items():
                if isinstance(value, (bool, int, float, str, tuple, Tensor)):
                    what = "the learning rate" if name == "lr" else f"{name!r}"
                    entries[f"{what} of parameter group {index}"] = _entry(value)
        entries["the order of the data"] = Entry(self._order.digest(), {"": "an order of its own"})
        frozen = set(state.frozen())
        for index, name in enumerate(state.names()):
            entries[f"requires_grad of {name}"] = _entry(index not in frozen)
        captured, live = box.capture(), {**box, **{OWN + k: v for k, v in box.own.items()}}
        for key, value in captured.items():
            schedule = isinstance(live[key], LRScheduler)
            name = f"{key.removeprefix(OWN)} of job.wrap" if key.startswith(OWN) else f"job.state[{key!r}]"
            entries[name] = _entry(value, None if schedule else key)
        return entries

    def _resolve(self, found: list[dict[str, Entry]]) -> None:
        """The members' entries differ: stop, or give rank 0's values of `job.state` to all."""
        given = []
        for name in dict.fromkeys(name for entries in found for name in entries):
            theirs = [entries.get(name) for entries in found]
            if len({entry.digest if entry else None for entry in theirs}) == 1:
                continue
            values = _differences(self._session.members, theirs)
            key = next((entry.key for entry in theirs if entry is not None), None)
            if key is None:
                raise RuntimeError(f"{name} differs between the workers: {values}. {_ADVICE}")
            if theirs[0] is not None:
                given.append(key)
            self._tell(
                name,
                f"{name} differed between the workers ({values}); all have the value of {self._session.members[0]} "
                "now, and from now on whenever it differs again. Set it on every worker: x = job.mean(x), or "
                "x = job.broadcast(x)",
            )
        box = self._replica.box
        values_of_main = self._meeting.exchange(
            "a correction of job.state", lambda: {k: v for k, v in box.capture().items() if k in given}
        )
        if self._session.rank != 0:
            box.restore(values_of_main[0])


_ADVICE = (
    "Pass schedules to job.wrap(..., schedulers=[...]), and take decisions on all workers with the same numbers: "
    "job.mean(x), job.broadcast(x), job.any(x)"
)

_ADVICE_ON_WEIGHTS = (
    "something has changed it on some workers only, such as load_state_dict or clipping within `if job.is_main`, or by "
    "a worker's own loss. Do it on every worker, with the same values: job.broadcast(x), job.mean(x)"
)

_ADVICE_ON_STREAMS = (
    "the IterableDataset gives another sample on some workers at the same place: if it shuffles by a random state of "
    "its own, some samples are trained on twice and others never. Let it follow from a fixed seed and the epoch: "
    "set_epoch(epoch). If only the augmentation of the sample is random, nothing is wrong"
)


def _entry(value: Any, key: str | None = None) -> Entry:
    if isinstance(value, dict):
        return Entry(fingerprint(value), {str(name): shown(item) for name, item in value.items()}, key)
    return Entry(fingerprint(value), {"": shown(value)}, key)


def _differences(members: Sequence[str], theirs: Sequence[Entry | None]) -> str:
    """What each member has, where they differ."""
    texts = [entry.texts if entry is not None else {"": "nothing"} for entry in theirs]
    every = dict.fromkeys(name for one in texts for name in one)
    parts = []
    for name in [n for n in every if len({one.get(n, "nothing") for one in texts}) > 1][:3]:
        values = ", ".join(f"{one.get(name, 'nothing')} on {who}" for who, one in zip(members, texts))
        parts.append(f"{name} {values}".strip())
    return "; ".join(parts)
