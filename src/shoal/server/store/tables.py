"""The tables of the store. Migrations lead to exactly this; a test compares the two."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

#: BIGINT that is also an autoincrementing key in SQLite.
Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
Seconds = sa.Double
Column = sa.Column

jobs = sa.Table(
    "jobs",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", sa.String(64), nullable=False),
    Column("user", sa.String(64), nullable=False),
    Column("state", sa.String(16), nullable=False),
    Column("message", sa.Text),
    Column("spec", sa.JSON, nullable=False),  # as submitted, without the values of secrets
    Column("given", sa.JSON, nullable=False),
    Column("min_gpus", sa.Integer, nullable=False),
    Column("max_gpus", sa.Integer, nullable=False),
    Column("requested_gpus", sa.Integer, nullable=False),
    Column("resize", sa.String(8), nullable=False),
    Column("model", sa.String(200), nullable=False),
    Column("gpus", sa.Integer, nullable=False, default=0),
    Column("target_gpus", sa.Integer, nullable=False, default=0),
    Column("gpu_type", sa.String(64)),
    Column("target", sa.JSON, nullable=False, default=list),  # [[node, gpus], ...] as last decided
    Column("generation", sa.Integer, nullable=False, default=0),
    Column("coordinator", sa.JSON),  # memory of the coordinator of a live job
    Column("progress", sa.JSON, nullable=False, default=dict),
    Column("submitted_s", Seconds, nullable=False),
    Column("settled_s", Seconds, nullable=False),
    Column("started_s", Seconds),
    Column("finished_s", Seconds),
    Column("checkpoint_s", Seconds),
    Column("waiting_s", Seconds, nullable=False, default=0.0),
    Column("running_s", Seconds, nullable=False, default=0.0),
    Column("paused_s", Seconds, nullable=False, default=0.0),
    Column("stalled_s", Seconds, nullable=False, default=0.0),
    Column("gpu_s", Seconds, nullable=False, default=0.0),
    Column("resizes", sa.Integer, nullable=False, default=0),
    Column("restarts", sa.Integer, nullable=False, default=0),
    Column("exit_code", sa.Integer),
    Column("signal", sa.String(16)),
    Column("array", Key),  # the array that it is a task of
    Column("array_index", sa.Integer),
    sa.Index("jobs_state", "state"),
    sa.Index("jobs_user", "user", "id"),
    sa.Index("jobs_name", "name"),
    sa.Index("jobs_array", "array"),
    sqlite_autoincrement=True,
)

workers = sa.Table(
    "workers",
    metadata,
    Column("id", sa.String(80), primary_key=True),
    Column("job", Key, sa.ForeignKey("jobs.id"), nullable=False, index=True),
    Column("rank", sa.Integer),
    Column("node", sa.String(64), nullable=False),
    Column("gpu", sa.Integer, nullable=False),
    Column("more_gpus", sa.JSON),  # further GPUs of the same node
    Column("state", sa.String(16), nullable=False),
    Column("pid", sa.Integer),
    Column("started_s", Seconds, nullable=False),
    Column("ended_s", Seconds),
    Column("exit_code", sa.Integer),
    Column("signal", sa.String(16)),
)

events = sa.Table(
    "events",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("at_s", Seconds, nullable=False),
    Column("type", sa.String(32), nullable=False),
    Column("actor", sa.String(64), nullable=False),
    Column("job", Key),
    Column("user", sa.String(64)),
    Column("plan", Key),
    Column("message", sa.Text, nullable=False),
    Column("data", sa.JSON, nullable=False),
    sa.Index("events_job", "job", "id"),
    sqlite_autoincrement=True,
)

users = sa.Table(
    "users",
    metadata,
    Column("name", sa.String(64), primary_key=True),
    Column("role", sa.String(8), nullable=False),
    Column("tickets", sa.Double, nullable=False),
    Column("created_s", Seconds, nullable=False),
    Column("group", sa.String(64)),
    Column("limits", sa.JSON),  # as `Limits.plain` gives them
    Column("account", sa.String(64)),  # of the machines, under which their jobs run; null: the server's
)

groups = sa.Table(
    "groups",
    metadata,
    Column("name", sa.String(64), primary_key=True),
    Column("tickets", sa.Double),
    Column("limits", sa.JSON),
    Column("created_s", Seconds, nullable=False),
)

#: Arrays and sweeps: jobs that were submitted together.
arrays = sa.Table(
    "arrays",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", sa.String(64), nullable=False),
    Column("user", sa.String(64), nullable=False),
    Column("tasks", sa.Integer, nullable=False),
    Column("max_running", sa.Integer),
    Column("created_s", Seconds, nullable=False),
    sa.Index("arrays_name", "name"),
    sqlite_autoincrement=True,
)

#: Addresses that receive notifications. The events themselves are the queue; `cursor` is the last one dealt with.
webhooks = sa.Table(
    "webhooks",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("user", sa.String(64), sa.ForeignKey("users.name"), nullable=False, index=True),
    Column("url", sa.Text, nullable=False),
    Column("format", sa.String(8), nullable=False),
    Column("events", sa.JSON, nullable=False),
    Column("secret", sa.String(100), nullable=False),
    Column("cursor", Key, nullable=False),
    Column("attempts", sa.Integer, nullable=False),  # failed ones for the event after the cursor
    Column("next_s", Seconds),  # no attempt before that
    Column("sent", sa.Integer, nullable=False),
    Column("dropped", sa.Integer, nullable=False),
    Column("last_error", sa.Text),
    Column("created_s", Seconds, nullable=False),
    sqlite_autoincrement=True,
)

tokens = sa.Table(
    "tokens",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("user", sa.String(64), sa.ForeignKey("users.name"), nullable=False, index=True),
    Column("hash", sa.String(64), nullable=False, unique=True),
    Column("label", sa.String(100), nullable=False),
    Column("created_s", Seconds, nullable=False),
    Column("last_used_s", Seconds),
    Column("expires_s", Seconds),
    sqlite_autoincrement=True,
)

#: What the server remembers of itself: the policy and its state, the ledger, the port of the control channel.
settings = sa.Table(
    "settings",
    metadata,
    Column("key", sa.String(64), primary_key=True),
    Column("value", sa.JSON, nullable=False),
)

#: What earlier jobs taught about speed: the state of one estimator per model word.
knowledge = sa.Table(
    "knowledge",
    metadata,
    Column("model", sa.String(200), primary_key=True),
    Column("speed", sa.JSON, nullable=False),
    Column("updated_s", Seconds, nullable=False),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    Column("user", sa.String(64), primary_key=True),
    Column("key", sa.String(200), primary_key=True),
    Column("body_hash", sa.String(64), nullable=False),
    Column("job", Key, sa.ForeignKey("jobs.id"), nullable=False),
    Column("created_s", Seconds, nullable=False),
)
