"""What a coordinator knows of its workers and generations, and two pure decisions on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.wire.messages import Order, Phase, Plan, Status


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait for what, in seconds."""

    heartbeat_timeout_s: float = 6.0  # a worker whose process stands still (SIGSTOP, lost host)
    away_timeout_s: float = 60.0  # the same outside its steps, where a script may keep Python's lock for long
    reconnect_s: float = 3.0  # a worker whose connection closed, when nothing else says that it died
    settle_s: float = 0.5  # a broken step, when no one is known to be lost
    hang_s: float = 120.0  # a worker that lives but does not arrive at a step where the others wait
    away_s: float = 3600.0  # the same while it evaluates or saves
    start_s: float = 600.0  # a newcomer that does not become ready


@dataclass(slots=True)
class WorkerView:
    """What the coordinator knows of a worker."""

    worker: str
    since_s: float
    connected: bool = False
    alive: bool = True
    stopping: bool = False
    why: str = "no longer wanted"  # the reason, if it is stopping
    met: bool = False  # it has connected at least once
    heard_s: float = 0.0
    arrived: int = 0
    arrived_s: float = 0.0
    halted_s: float = 0.0
    announced: bool = False
    status: Status = field(default_factory=lambda: Status(seq=0, phase=Phase.STARTING))
    sent: Order = field(default_factory=lambda: Order(seq=0))


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    members: tuple[str, ...]


@dataclass(slots=True)
class Pending:
    plan: Plan
    committed: bool = False


def resume_step(holders: list[tuple[int, bool]], ends: list[int]) -> int:
    """The step that all go on from, given (steps done, holds the gradients of the next) of each halted survivor.

    The vote that ends a step completes only if every member has complete gradients. So if someone is ahead,
    those behind hold the gradients; and if all hold them, all can use them; else no one has, and they are lost.
    """
    furthest = max([done for done, _ in holders] + ends)
    if all(holds and done == furthest for done, holds in holders):
        return furthest + 1
    return furthest


def first_difference(
    expected: tuple[str, ...], found: tuple[str, ...], one: str = "the job", other: str = "this worker"
) -> str | None:
    """What the first line is in which two signatures differ, in words."""
    for want, have in zip(expected, found):
        if want != have:
            return f"{one} has {want!r}, {other} has {have!r}"
    if len(found) > len(expected):
        return f"{other} has {found[len(expected)]!r}, {one} has nothing there"
    if len(found) < len(expected):
        return f"{one} has {expected[len(found)]!r}, {other} has nothing there"
    return None
