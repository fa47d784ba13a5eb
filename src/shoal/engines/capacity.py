"""How many machines to hold: the rule of elastic capacity. It does no I/O and reads no clock.

Request machines while jobs wait that these machines would start or speed up, up to the maximum. Return machines that
have been idle for `idle_s`, down to the minimum. Never return a machine that a job uses. The idle time is the
hysteresis: a machine that was requested in vain is kept that long before it is returned, and any demand that it could
serve keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.engines.base import NewMachine

FIRST_RETRY_S, MAX_RETRY_S = 15.0, 600.0


@dataclass(frozen=True, slots=True)
class CapacityLimits:
    """The range of `--nodes` and the value of `--idle`."""

    min_machines: int
    max_machines: int
    idle_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_machines <= self.max_machines:
            raise ValueError(
                f"the range of machines {self.min_machines}..{self.max_machines} is empty or negative"
            )
        if not self.idle_s >= 0:
            raise ValueError(f"the idle time must not be negative, not {self.idle_s}")


@dataclass(frozen=True, slots=True)
class Demand:
    """GPUs that a job would take at once if they were free: to start, or to become faster."""

    gpus: int
    #: The types it can use. Empty: any.
    gpu_types: tuple[str, ...] = ()

    def can_use(self, gpu_type: str | None) -> bool:
        return not self.gpu_types or gpu_type in self.gpu_types


@dataclass(frozen=True, slots=True)
class HeldMachine:
    """A machine that this home holds or has requested. Machines that are leaving or gone are not listed."""

    id: str
    gpus: int
    gpu_type: str = ""
    #: GPUs that no job uses. All of them while the machine is coming.
    free_gpus: int = 0
    #: True: it is requested, pending or starting.
    coming: bool = False
    #: How long no job has used the machine, or wanted it while it was coming.
    idle_for_s: float = 0.0
    #: False: no job gets its free GPUs, because a person drained it or its agent is away.
    usable: bool = True

    @property
    def busy(self) -> bool:
        return not self.coming and self.free_gpus < self.gpus


@dataclass(frozen=True, slots=True)
class CapacityChange:
    #: What each machine to request must have.
    request: tuple[NewMachine, ...] = ()
    #: Ids of the machines to return.
    release: tuple[str, ...] = ()


def decide_capacity(
    limits: CapacityLimits,
    demand: Iterable[Demand],
    held: Sequence[HeldMachine],
    offers: Sequence[NewMachine],
) -> CapacityChange:
    """Which machines to request and which to return now. It never does both.

    1. Serve the demand from free and coming GPUs, those of busy machines first, so that idle ones can be returned.
    2. Request machines for the rest of the demand, and for the minimum.
    3. If nothing is requested, return the machines that serve no demand and have been idle for long enough: first
       those that are coming, then those that have been idle the longest.

    Machines that cannot be used serve no demand. They are returned even below the minimum: others replace them then.
    """
    # Typed demand chooses first: demand for any type can use what is left.
    wanted = sorted((d for d in demand if d.gpus > 0), key=lambda d: not d.gpu_types)
    serving, unserved = _serve(wanted, held)
    shop = _Shop(offers, max(0, limits.max_machines - len(held)))
    for want in unserved:
        shop.serve(want)
    while len(held) + len(shop.chosen) < limits.min_machines and shop.choose(Demand(1)):
        pass
    if shop.chosen:
        return CapacityChange(request=tuple(shop.chosen))

    surplus = max(0, len(held) - limits.min_machines)
    idle = [m for m in held if not m.busy and m.id not in serving and m.idle_for_s >= limits.idle_s]
    idle.sort(key=lambda m: (m.usable, not m.coming, -m.idle_for_s, m.id))
    unusable = sum(not m.usable for m in idle)
    return CapacityChange(release=tuple(m.id for m in idle[: max(surplus, unusable)]))


def _serve(wanted: Iterable[Demand], held: Sequence[HeldMachine]) -> tuple[set[str], list[Demand]]:
    """The machines that can serve demand, and the demand that is left."""
    serving: set[str] = set()
    left: list[Demand] = []
    free = {m.id: max(0, m.free_gpus) if m.usable else 0 for m in held}
    by_use = sorted(held, key=lambda m: (not m.busy, m.coming, m.idle_for_s, m.id))
    for want in wanted:
        missing_gpus = want.gpus
        for machine in by_use:
            if want.can_use(machine.gpu_type):
                taken = min(missing_gpus, free[machine.id])
                if taken:
                    free[machine.id] -= taken
                    missing_gpus -= taken
                    serving.add(machine.id)
        if missing_gpus:
            left.append(Demand(missing_gpus, want.gpu_types))
    return serving, left


class _Shop:
    """Chooses new machines, at most `room`."""

    def __init__(self, offers: Sequence[NewMachine], room: int) -> None:
        self._offers = [o for o in offers if o.gpus > 0]
        self._left = [math.inf if o.count is None else o.count for o in self._offers]
        self._room = room
        self.chosen: list[NewMachine] = []
        self._free_gpus: list[int] = []

    def serve(self, want: Demand) -> None:
        missing_gpus = want.gpus
        for i, machine in enumerate(self.chosen):
            if want.can_use(machine.gpu_type):
                missing_gpus -= self._take(i, missing_gpus)
        while missing_gpus > 0 and self.choose(want):
            missing_gpus -= self._take(len(self.chosen) - 1, missing_gpus)

    def _take(self, i: int, gpus: int) -> int:
        taken = min(gpus, self._free_gpus[i])
        self._free_gpus[i] -= taken
        return taken

    def choose(self, want: Demand) -> bool:
        """Take one more machine that serves the demand. False: there is none, or no room."""
        for i, offer in enumerate(self._offers):
            if len(self.chosen) < self._room and self._left[i] > 0 and want.can_use(offer.gpu_type):
                self._left[i] -= 1
                self.chosen.append(NewMachine(offer.gpus, offer.gpu_type))
                self._free_gpus.append(offer.gpus)
                return True
        return False


class IdleTimes:
    """Since when each machine has been idle. A restart begins anew, which only keeps machines longer."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def update(self, now_s: float, machines: Iterable[str], in_use: Iterable[str]) -> dict[str, float]:
        """Take in which machines exist and which of them are in use, and return how long each has been idle.

        `now_s` is a monotonic clock. A coming machine is in use while there is demand.
        """
        used = set(in_use)
        self._since_s = {m: now_s if m in used else self._since_s.get(m, now_s) for m in machines}
        return {m: now_s - since_s for m, since_s in self._since_s.items()}


def retry_delay_s(failures: int) -> float:
    """How long to wait before the next request after this many failures in a row.

    Refused requests and machines that end as soon as they are up are failures. Without the delay, a wrong option
    would send a request to the engine at every decision.
    """
    if failures <= 0:
        return 0.0
    return float(min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), MAX_RETRY_S))
