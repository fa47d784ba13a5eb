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
    unused_gpus: int = Field(0, description="Held by jobs that have not used them for a while.")
    entitled_gpus: float = Field(description="Due now by tickets, at most what the jobs of the user can use.")
    running_jobs: int | None = Field(description="null: you may not see the jobs of this user.")
    pending_jobs: int | None = Field(description="null: you may not see the jobs of this user.")
    entitled_gpu_s: float
    received_gpu_s: float
    lent_gpu_s: float
    borrowed_gpu_s: float
    traded_gpu_s: float
    traded_by_type_gpu_s: dict[str, float] = Field(
        default_factory=dict, description="Bought of each GPU type; sold if negative. Empty without trades."
    )


class ShareList(Page[Share]):
    """The fairness ledger."""

    since: datetime
    total_gpus: int = Field(description="Usable now.")
    idle_gpus: int = Field(0, description="Held by no job now.")
    idle_gpu_s: float = Field(
        0.0, description="GPU time that no user received: capacity without all `received`."
    )
    capacity_gpu_s: float = Field(0.0, description="GPU time that could be used since then.")


class NodeStatus(BaseModel, json_schema_extra=shown(ex.NODE)):
    name: str
    gpu_type: str
    gpus: int
    used: int
    virtual: bool
    devices: list[str] = Field(default_factory=list, description="Name or id of each GPU.")
    state: Literal["ready", "drained", "leaving", "kept off", "unreachable", "lost"] = Field(
        "ready", description="Jobs get GPUs of a node that is ready only."
    )
    why: str | None = Field(None, description="Why it is not ready, unless a person drained it.")
    leaves_at: datetime | None = Field(None, description="When its machine is taken away.")
    address: str = Field("127.0.0.1", description="What workers on other nodes connect to.")
    rack: str = "rack0"
    domain: str = "domain0"
    engine: str | None = Field(None, description="How the engine that provides the machine sees it.")
    warnings: list[str] = Field(
        default_factory=list, description="What is wrong with its machine. `/doctor` says what to do."
    )


class RefusedAgent(BaseModel, json_schema_extra=shown(ex.REFUSED_AGENT)):
    """A machine that wanted to join and was refused."""

    agent: str | None = Field(description="What it calls itself, which nothing proves. null: not known.")
    address: str
    why: str
    at: datetime = Field(description="The last time.")


class NodeList(Page[NodeStatus]):
    """All nodes."""

    refused: list[RefusedAgent] = Field(
        default_factory=list, description="Agents that were refused within a day. Shown to admins."
    )


class Node(NodeStatus):
    """One node and its jobs."""

    jobs: list[JobRef] = Field(default_factory=list, description="Jobs that hold GPUs of this node.")


class JoinToken(BaseModel, json_schema_extra=shown(ex.JOIN_TOKEN)):
    id: str
    expires_at: datetime
    used_by: str | None = Field(None, description="The agent that joined with it. No other can.")


class JoinTokenList(Page[JoinToken]):
    pass


class JoinTokenCreate(Given, json_schema_extra=shown({"expires_in_s": 3600})):
    expires_in_s: float = Field(3600.0, gt=0, le=30 * 86400)


class JoinTokenCreated(
    JoinToken,
    json_schema_extra=shown(ex.JOIN_TOKEN | {"token": "shoal-join:...", "address": "10.0.0.1:7600"}),
):
    token: str = Field(description="Shown only this once; the server keeps its hash.")
    address: str = Field(description="Where the agent connects to.")


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
    upload_limit_bytes: int = Field(0, description="The most that an uploaded working directory may have.")


class Check(BaseModel, json_schema_extra=shown(ex.CHECK)):
    name: str
    status: Literal["ok", "warning", "error"]
    message: str
    hint: str | None = None


class Doctor(BaseModel, json_schema_extra=shown({"healthy": True, "checks": [ex.CHECK]})):
    healthy: bool
    checks: list[Check]


class Workdir(BaseModel, json_schema_extra=shown({"digest": "9f" * 32, "size_bytes": 120_000})):
    """A working directory that was uploaded."""

    digest: str
    size_bytes: int


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
