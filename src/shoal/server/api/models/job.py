"""A job, its profile, and why it has its share."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from shoal.core.job import When
from shoal.core.reason import Reason as CoreReason
from shoal.server.api.models import examples as ex
from shoal.server.api.models.common import Given, Page
from shoal.server.api.models.examples import shown
from shoal.server.api.models.spec import JobNeeds, JobSpec, JobState, Resize


class Reason(BaseModel, json_schema_extra=shown(ex.REASON)):
    """Why a job does not have all the GPUs it could use."""

    code: str = Field(
        description="Held, Infeasible, ExceedsLimit, ...: in order of precedence in docs/api.md"
    )
    sentence: str
    evidence: dict[str, float | int | str] = Field(default_factory=dict)

    @classmethod
    def of(cls, reason: CoreReason) -> Reason:
        """From a reason of the scheduler. JSON has no infinity, so infinite numbers are left out."""
        plain = {k: v.item() if hasattr(v, "item") else v for k, v in reason.evidence.items()}
        finite = {k: v for k, v in plain.items() if not isinstance(v, float) or math.isfinite(v)}
        return cls(code=reason.code.label, sentence=reason.sentence, evidence=finite)


class GpuPlace(BaseModel):
    node: str
    gpus: list[int] = Field(description="Indices of its GPUs on this node.")


class Worker(BaseModel):
    """One process of a job, bound to one GPU, or to all GPUs of a command on one machine."""

    id: str
    rank: int | None = None
    node: str
    gpu: int
    gpus: list[int] = Field(default_factory=list, description="All its GPUs.")
    state: Literal["starting", "ready", "active", "stopped", "leaving", "ended"]
    pid: int | None = None
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    signal: str | None = Field(None, description="SIGKILL, ... if a signal ended it.")


class Estimate(BaseModel):
    """A duration and what it is based on. `unknown` says why there is no estimate."""

    low_s: float | None = None
    high_s: float | None = None
    basis: str | None = None
    unknown: str | None = None


class AfterRef(BaseModel):
    """A job whose end it waits for."""

    job: int
    name: str
    on: When


class ArrayRef(BaseModel):
    """The array or sweep that a job is a task of."""

    id: int
    name: str
    index: int
    values: dict[str, str | int | float | bool] = Field(default_factory=dict, description="Those of a sweep.")


class Job(BaseModel, json_schema_extra=shown(ex.JOB)):
    """A job as it is now."""

    id: int
    name: str
    user: str
    state: JobState
    reason: Reason | None = Field(None, description="Null if it has all it could use, or is over.")
    message: str | None = Field(None, description="How it ended, or the last problem.")
    # size
    gpus: int = Field(description="GPUs it holds now.")
    target_gpus: int = Field(description="GPUs it shall have; differs from `gpus` during a reconfiguration.")
    gpu_type: str | None = None
    min_gpus: int
    max_gpus: int
    step_gpus: int = Field(1, description="It has multiples of this.")
    requested_gpus: int
    resize: Resize
    placement: list[GpuPlace] = Field(default_factory=list)
    guest_of: int | None = Field(
        None,
        description="The job with which it is co-located on one GPU or, while pending, on whose GPU it prepares.",
    )
    generation: int = 0
    workers: list[Worker] = Field(default_factory=list, description="Empty in lists: see GET /jobs/{id}.")
    # what was submitted
    command: list[str]
    workdir: str
    env: dict[str, str] = Field(default_factory=dict)
    secrets: list[str] = Field(default_factory=list, description="Names only.")
    gpu_types: list[str] = Field(default_factory=list)
    weight: float = 1.0
    model: str = ""
    max_restarts: int = 0
    autoscale: str | None = None
    target_loss: float | None = None
    replace_stragglers: bool = False
    needs: JobNeeds | None = Field(
        None, description="Needs of one GPU, as given or as measured of earlier jobs."
    )
    grace_s: float = 10.0
    priority: int = 0
    labels: dict[str, str] = Field(default_factory=dict)
    not_before: datetime | None = None
    deadline: datetime | None = None
    time_limit_s: float | None = None
    warn_signal: str | None = None
    warn_s: float = 60.0
    after: list[AfterRef] = Field(default_factory=list)
    array: ArrayRef | None = None
    idle_s: float | None = Field(
        None, description="How long it has held GPUs without using them; null if it uses them."
    )
    given: list[str] = Field(
        default_factory=list, description="Fields that the owner gave; all others have defaults."
    )
    # progress
    step: int | None = None
    total_steps: int | None = None
    progress: float | None = Field(None, ge=0, le=1)
    speed: float | None = Field(None, description="Steps per second, measured.")
    speedup: float | None = Field(None, description="Relative to one GPU, measured or estimated.")
    speedup_measured: bool = Field(False, description="Whether it was measured with one GPU and at its size.")
    values: dict[str, float] = Field(
        default_factory=dict, description="The last of each logged value: loss, ..."
    )
    remaining: Estimate | None = None
    # times
    submitted_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    checkpoint_at: datetime | None = None
    waiting_s: float = Field(0.0, description="Without GPUs, waiting for some.")
    running_s: float = Field(0.0, description="With GPUs.")
    paused_s: float = Field(0.0, description="Held by its owner.")
    stalled_s: float = Field(
        0.0, description="Part of the running time in which training stood still for resizes."
    )
    gpu_s: float = Field(0.0, description="GPU-seconds received.")
    resizes: int = 0
    restarts: int = 0
    exit_code: int | None = None
    signal: str | None = None


class JobList(Page[Job]):
    """Newest first."""


class Array(BaseModel, json_schema_extra=shown(ex.ARRAY)):
    """Jobs that were submitted together: an array or a sweep."""

    id: int
    name: str
    user: str
    tasks: int
    max_running: int | None = None
    created_at: datetime
    jobs: dict[str, int] = Field(description="Number of its jobs by state.")
    gpus: int = Field(0, description="GPUs that its jobs hold now.")
    first: int = Field(description="Number of its first job.")
    last: int = Field(description="Number of its last job.")

    @property
    def unfinished(self) -> int:
        """Number of its jobs that are not over."""
        return sum(count for state, count in self.jobs.items() if not JobState(state).is_final)


class SpeedPoint(BaseModel):
    gpus: int
    speed: float = Field(description="Steps per second.")
    measured: bool
    low_speed: float | None = Field(
        None, description="Lower end of the 90 % interval; null if nothing is known."
    )
    high_speed: float | None = Field(
        None, description="Upper end of the 90 % interval; null if nothing is known."
    )
    fitted_speed: float | None = Field(
        None, description="The speed by the fitted curve, also where it was measured."
    )


class Profile(BaseModel, json_schema_extra=shown(ex.PROFILE)):
    """What is known of a job's speed and remaining work."""

    job: JobRef
    basis: str = Field(description="Source of the speeds: measurements, earlier jobs, or an assumption.")
    points: list[SpeedPoint]
    remaining: Estimate
    next_gpus: int | None = Field(
        None, description="The size at which exploration would measure it next; null if none is worth it now."
    )
    next_measurement: str = Field("", description="`next_gpus` in words, or why nothing is measured.")
    measuring: str | None = Field(None, description="The trial under way, if the job takes part in one.")


class JobRef(BaseModel, json_schema_extra=shown(ex.JOB_REF)):
    """A job in an answer about another. The name is null unless you may see the job."""

    id: int
    name: str | None = None
    user: str
    state: JobState
    gpus: int
    target_gpus: int
    min_gpus: int
    max_gpus: int
    step_gpus: int = 1


class CouldDo(BaseModel):
    """The smallest change of one kind that would start or grow the job now, tried on a copy of the scheduler."""

    change: Literal["min_gpus", "requested_gpus", "gpu_types", "resume", "finish_job"]
    value: int | str
    sentence: str


class Preemption(BaseModel):
    """The last time that a job lost GPUs to others: when, by which policy, to which jobs, and why."""

    at: datetime
    from_gpus: int
    to_gpus: int
    policy: str
    by: list[JobRef] = Field(
        default_factory=list, description="Jobs that got GPUs by the same decision, with their present state."
    )
    reason: Reason | None = Field(None, description="Why the policy gave it no more at that moment.")
    decision: int | None = None
    sentence: str


class Why(BaseModel, json_schema_extra=shown(ex.WHY)):
    """Why a job has its present share: the answer to `shoal why`."""

    job: JobRef
    reason: Reason | None
    sentence: str
    policy: str
    ahead: list[JobRef] = Field(
        default_factory=list, description="Jobs that hold GPUs or get some first; at most 5."
    )
    ahead_total: int = 0
    starts_in: Estimate | None = Field(None, description="Null if it runs already or is over.")
    grows_in: Estimate | None = Field(
        None, description="When GPUs that it could use are allocated anew; only for a job that has some."
    )
    could: list[CouldDo] = Field(default_factory=list)
    deadline: str | None = Field(None, description="Whether its deadline will be met, if it has one.")
    quantum: str | None = Field(
        None, description="How long jobs keep their GPUs under the policy in force, if it has such a time."
    )
    last_decision: int | None = Field(None, description="Number of the decision.")
    decided_at: datetime | None = None
    at: datetime | None = Field(None, description="The time that was asked about; null for now.")
    preempted: Preemption | None = Field(None, description="Only if it was asked for and has happened.")


class PlanRequest(Given, json_schema_extra=shown({"spec": ex.SPEC})):
    """A job to try on a copy of the scheduler. Nothing changes."""

    spec: JobSpec


class Change(BaseModel):
    """A change of another job's share."""

    job: JobRef
    from_gpus: int
    to_gpus: int


class PlanOutcome(BaseModel, json_schema_extra=shown(ex.PLAN)):
    verdict: Literal["starts", "waits", "shrinks_others", "infeasible"]
    gpus: int
    reason: Reason | None = None
    sentence: str
    changes: list[Change] = Field(default_factory=list)
