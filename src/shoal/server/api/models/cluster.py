"""The cluster: its nodes, shares, policy and health."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.server.api.models import examples as ex
from shoal.server.api.models.common import Given, Page
from shoal.server.api.models.examples import shown
from shoal.server.api.models.job import JobRef


class Share(BaseModel, json_schema_extra=shown(ex.SHARE)):
    """One user's line in the fairness ledger; GPU-seconds since the ledger began."""

    user: str
    tickets: float
    gpus: int = Field(description="Held now.")
    entitled_gpus: float = Field(description="Due now by tickets, at most what the jobs of the user can use.")
    running_jobs: int
    pending_jobs: int
    entitled_gpu_s: float
    received_gpu_s: float
    lent_gpu_s: float
    borrowed_gpu_s: float
    traded_gpu_s: float


class ShareList(Page[Share]):
    """The fairness ledger."""

    since: datetime
    total_gpus: int


class NodeStatus(BaseModel, json_schema_extra=shown(ex.NODE)):
    name: str
    gpu_type: str
    gpus: int
    used: int
    virtual: bool
    devices: list[str] = Field(default_factory=list, description="Name or id of each GPU.")
    state: Literal["ready", "drained"] = Field("ready", description="drained: no job gets its GPUs.")


class NodeList(Page[NodeStatus]):
    """All nodes."""


class Node(NodeStatus):
    """One node and its jobs."""

    jobs: list[JobRef] = Field(default_factory=list, description="Jobs that hold GPUs of this node.")


class Status(BaseModel, json_schema_extra=shown(ex.STATUS)):
    """What is in force."""

    version: str
    api: str = "v1"
    home: str
    pid: int
    address: str
    started_at: datetime
    executor: str
    virtual: bool = Field(description="The GPUs are virtual: jobs run on the CPU.")
    policy: str
    policy_options: dict[str, Any] = Field(default_factory=dict)
    policy_given: dict[str, str] = Field(
        default_factory=dict, description="Options that were given; the others have defaults."
    )
    share: bool = Field(False, description="Jobs that wait for one GPU may be co-located with other jobs.")
    pre_schedule: bool = Field(
        False, description="The next job may prepare on a GPU whose job is about to end."
    )
    store: Literal["sqlite", "postgresql"] = "sqlite"
    nodes: list[NodeStatus]
    total_gpus: int
    used_gpus: int
    jobs: dict[str, int] = Field(description="Number of jobs you may see, by state.")
    user: str = Field(description="Your user name.")
    role: str
    warnings: list[str] = Field(default_factory=list)
    last_event: int = 0


class Check(BaseModel, json_schema_extra=shown(ex.CHECK)):
    name: str
    status: Literal["ok", "warning", "error"]
    message: str
    hint: str | None = None


class Doctor(BaseModel, json_schema_extra=shown({"healthy": True, "checks": [ex.CHECK]})):
    healthy: bool
    checks: list[Check]


class PolicyInfo(BaseModel, json_schema_extra=shown(ex.POLICY)):
    name: str
    summary: str
    elastic: bool
    needs_lengths: bool


class PolicyInfoList(Page[PolicyInfo]):
    """What `shoal policy ls -o json` prints."""


class Policy(PolicyInfo):
    """The policy in force, and the available ones."""

    options: dict[str, Any] = Field(default_factory=dict)
    available: list[PolicyInfo] = Field(default_factory=list)


class PolicySet(Given):
    name: str = Field(max_length=100)
    options: dict[str, str] = Field(default_factory=dict, max_length=64)

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"name": "afs-p"}})


class Shutdown(Given, json_schema_extra=shown({"jobs": "keep"})):
    jobs: Literal["stop", "keep"] = Field(
        "stop",
        description="stop: jobs release their GPUs and continue after the next start; keep: they run on.",
    )
