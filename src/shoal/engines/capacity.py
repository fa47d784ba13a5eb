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
    #: None: any type.
    gpu_type: str | None = None


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

    @property
    def busy(self) -> bool:
        return not self.coming and self.free_gpus < self.gpus


@dataclass(frozen=True, slots=True)
class NewMachine:
    """What one more machine brings."""

    gpus: int
    #: None: the type is not known beforehand. It serves demand for any type that names none.
    gpu_type: str | None = None


@dataclass(frozen=True, slots=True)
class CapacityChange:
    request: int = 0
    #: Ids of the machines to return.
    release: tuple[str, ...] = ()


def decide_capacity(
    limits: CapacityLimits, demand: Iterable[Demand], held: Sequence[HeldMachine], new: NewMachine
) -> CapacityChange:
    """How many machines to request and which to return now. It never does both.

    1. Serve the demand from free and coming GPUs, those of busy machines first, so that idle ones can be returned.
    2. Request machines for the rest of the demand, and for the minimum.
    3. If nothing is requested, return the machines that serve no demand and have been idle for long enough: first
       those that are coming, then those that have been idle the longest.
    """
    left = [d for d in demand if d.gpus > 0]
    serving: set[str] = set()
    # Typed demand chooses first: demand for any type can use what is left.
    left.sort(key=lambda d: d.gpu_type is None)
    missing_gpus = 0
    free = {m.id: max(0, m.free_gpus) for m in held}
    by_use = sorted(held, key=lambda m: (not m.busy, m.coming, m.idle_for_s, m.id))
    for want in left:
        wanted_gpus = want.gpus
        for machine in by_use:
            if want.gpu_type is not None and machine.gpu_type != want.gpu_type:
                continue
            taken = min(wanted_gpus, free[machine.id])
            if taken:
                free[machine.id] -= taken
                wanted_gpus -= taken
                serving.add(machine.id)
        if want.gpu_type is None or want.gpu_type == new.gpu_type:
            missing_gpus += wanted_gpus

    for_demand = math.ceil(missing_gpus / new.gpus) if new.gpus > 0 else 0
    for_minimum = limits.min_machines - len(held)
    request = min(max(for_demand, for_minimum, 0), max(0, limits.max_machines - len(held)))
    if request:
        return CapacityChange(request=request)

    surplus = max(0, len(held) - limits.min_machines)
    idle = [m for m in held if not m.busy and m.id not in serving and m.idle_for_s >= limits.idle_s]
    idle.sort(key=lambda m: (not m.coming, -m.idle_for_s, m.id))
    return CapacityChange(release=tuple(m.id for m in idle[:surplus]))


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
