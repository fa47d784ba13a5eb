"""The lifecycle of a job: its states, the verbs that lead from one to the next, and its time by state. Pure.

A verb sets state, message and times together, so they stay consistent. A transition that is not in the table raises
`WrongState` with a sentence for the person who asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from shoal.core.errors import ShoalError
from shoal.server.api.models import JobState

PENDING, STARTING, RUNNING = JobState.PENDING, JobState.STARTING, JobState.RUNNING
PAUSED, STOPPING = JobState.PAUSED, JobState.STOPPING
SUCCEEDED, FAILED, CANCELLED = JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED


class Verb(StrEnum):
    """What can happen to a job; the value is the type of the event that records it."""

    START = "job.started"  # it has GPUs, its workers prepare
    RUN = "job.running"  # all workers of a generation are at work
    PREEMPT = "job.preempted"  # the scheduler took its GPUs
    RESTART = "job.restarted"  # it failed or lost its workers, and may try again
    HOLD = "job.paused"  # its owner holds it
    RELEASE = "job.resumed"  # its owner lets it continue
    CANCEL = "job.stopping"  # its owner ends it; its workers are asked to end
    SUCCEED = "job.succeeded"
    FAIL = "job.failed"
    VANISH = "job.cancelled"  # it was cancelled and its last worker has ended


_TABLE: dict[Verb, dict[JobState, JobState]] = {
    Verb.START: {PENDING: STARTING},
    Verb.RUN: {STARTING: RUNNING},
    Verb.PREEMPT: {STARTING: PENDING, RUNNING: PENDING},
    Verb.RESTART: {STARTING: PENDING, RUNNING: PENDING, PENDING: PENDING, PAUSED: PAUSED},
    Verb.HOLD: {PENDING: PAUSED, STARTING: PAUSED, RUNNING: PAUSED},
    Verb.RELEASE: {PAUSED: PENDING},
    Verb.CANCEL: {PENDING: STOPPING, STARTING: STOPPING, RUNNING: STOPPING, PAUSED: STOPPING},
    # A job may end while it is being preempted, held or cancelled: its own result counts.
    Verb.SUCCEED: dict.fromkeys((PENDING, STARTING, RUNNING, PAUSED, STOPPING), SUCCEEDED),
    Verb.FAIL: dict.fromkeys((PENDING, STARTING, RUNNING, PAUSED), FAILED),
    Verb.VANISH: {STOPPING: CANCELLED},
}

_PLEASE: dict[Verb, str] = {Verb.HOLD: "paused", Verb.RELEASE: "resumed", Verb.CANCEL: "cancelled"}


#: Transitions that the message of an error contains.
LONGEST_STORY = 12


class WrongState(ShoalError):
    """The job is not in a state that allows this. If nobody asked for it, the message contains the job's story."""


@dataclass(frozen=True, slots=True)
class Life:
    """One job's state, and where its time went up to `settled_s`."""

    state: JobState
    submitted_s: float
    settled_s: float
    message: str | None = None
    gpus: int = 0
    started_s: float | None = None
    finished_s: float | None = None
    waiting_s: float = 0.0
    running_s: float = 0.0
    paused_s: float = 0.0
    gpu_s: float = 0.0
    restarts: int = 0
    #: The last transitions since this server knows the job, for the message of an error.
    story: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def begin(cls, now_s: float) -> Life:
        return cls(PENDING, submitted_s=now_s, settled_s=now_s)


def settle(life: Life, now_s: float) -> Life:
    """Account for the time up to now. A clock that stands still or goes back adds nothing."""
    spent_s = max(now_s - life.settled_s, 0.0)
    if life.state.is_final or not spent_s:
        return life
    waits = life.state is PENDING and not life.gpus
    holds = life.state is PAUSED and not life.gpus
    return replace(
        life,
        settled_s=now_s,
        waiting_s=life.waiting_s + spent_s * waits,
        paused_s=life.paused_s + spent_s * holds,
        running_s=life.running_s + spent_s * (not waits and not holds),
        gpu_s=life.gpu_s + spent_s * life.gpus,
    )


def hold_gpus(life: Life, gpus: int, now_s: float) -> Life:
    """It holds another number of GPUs from now on."""
    return replace(settle(life, now_s), gpus=gpus)


def apply(life: Life, verb: Verb, now_s: float, message: str | None = None) -> Life:
    """The job after `verb`; WrongState if that cannot happen now."""
    state = _TABLE[verb].get(life.state)
    if state is None:
        if verb in _PLEASE:
            raise WrongState(f"it is {life.state.value} and cannot be {_PLEASE[verb]}")
        story = "; ".join(life.story) or "no transition is known"
        raise WrongState(f"{verb.value} cannot follow {life.state.value} (its story: {story})")
    life = settle(life, now_s)
    transition = f"{life.state.value} -> {state.value} by {verb.value} at {now_s:.3f}"
    story_so_far = (*life.story, transition)[-LONGEST_STORY:]
    life = replace(life, state=state, story=story_so_far)
    life = replace(life, message=message if message is not None else life.message)
    if verb is Verb.START and life.started_s is None:
        life = replace(life, started_s=now_s)
    if verb is Verb.RUN:
        life = replace(life, message=message)
    if verb is Verb.RESTART:
        life = replace(life, restarts=life.restarts + 1)
    if state.is_final:
        life = replace(life, finished_s=now_s, gpus=0)
    return life


def may(life: Life, verb: Verb) -> bool:
    return life.state in _TABLE[verb]
