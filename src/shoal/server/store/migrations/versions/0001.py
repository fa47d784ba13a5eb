"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
Column, Text, Json, Int, Real = sa.Column, sa.String, sa.JSON, sa.Integer, sa.Double


def upgrade() -> None:
    op.create_table(
        "jobs",
        Column("id", Key, primary_key=True, autoincrement=True),
        Column("name", Text(64), nullable=False),
        Column("user", Text(64), nullable=False),
        Column("state", Text(16), nullable=False),
        Column("message", sa.Text),
        Column("spec", Json, nullable=False),
        Column("given", Json, nullable=False),
        Column("min_gpus", Int, nullable=False),
        Column("max_gpus", Int, nullable=False),
        Column("requested_gpus", Int, nullable=False),
        Column("resize", Text(8), nullable=False),
        Column("model", Text(200), nullable=False),
        Column("gpus", Int, nullable=False),
        Column("target_gpus", Int, nullable=False),
        Column("gpu_type", Text(64)),
        Column("target", Json, nullable=False),
        Column("generation", Int, nullable=False),
        Column("coordinator", Json),
        Column("progress", Json, nullable=False),
        Column("submitted_s", Real, nullable=False),
        Column("settled_s", Real, nullable=False),
        Column("started_s", Real),
        Column("finished_s", Real),
        Column("checkpoint_s", Real),
        Column("waiting_s", Real, nullable=False),
        Column("running_s", Real, nullable=False),
        Column("paused_s", Real, nullable=False),
        Column("stalled_s", Real, nullable=False),
        Column("gpu_s", Real, nullable=False),
        Column("resizes", Int, nullable=False),
        Column("restarts", Int, nullable=False),
        Column("exit_code", Int),
        Column("signal", Text(16)),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_state", "jobs", ["state"])
    op.create_index("jobs_user", "jobs", ["user", "id"])
    op.create_index("jobs_name", "jobs", ["name"])
    op.create_table(
        "workers",
        Column("id", Text(80), primary_key=True),
        Column("job", Key, sa.ForeignKey("jobs.id"), nullable=False),
        Column("rank", Int),
        Column("node", Text(64), nullable=False),
        Column("gpu", Int, nullable=False),
        Column("state", Text(16), nullable=False),
        Column("pid", Int),
        Column("started_s", Real, nullable=False),
        Column("ended_s", Real),
        Column("exit_code", Int),
        Column("signal", Text(16)),
    )
    op.create_index("ix_workers_job", "workers", ["job"])
    op.create_table(
        "events",
        Column("id", Key, primary_key=True, autoincrement=True),
        Column("at_s", Real, nullable=False),
        Column("type", Text(32), nullable=False),
        Column("actor", Text(64), nullable=False),
        Column("job", Key),
        Column("user", Text(64)),
        Column("plan", Key),
        Column("message", sa.Text, nullable=False),
        Column("data", Json, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_job", "events", ["job", "id"])
    op.create_table(
        "users",
        Column("name", Text(64), primary_key=True),
        Column("role", Text(8), nullable=False),
        Column("tickets", Real, nullable=False),
        Column("created_s", Real, nullable=False),
    )
    op.create_table(
        "tokens",
        Column("id", Key, primary_key=True, autoincrement=True),
        Column("user", Text(64), sa.ForeignKey("users.name"), nullable=False),
        Column("hash", Text(64), nullable=False, unique=True),
        Column("label", Text(100), nullable=False),
        Column("created_s", Real, nullable=False),
        Column("last_used_s", Real),
        Column("expires_s", Real),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tokens_user", "tokens", ["user"])
    op.create_table(
        "settings", Column("key", Text(64), primary_key=True), Column("value", Json, nullable=False)
    )
    op.create_table(
        "knowledge",
        Column("model", Text(200), primary_key=True),
        Column("speed", Json, nullable=False),
        Column("updated_s", Real, nullable=False),
    )
    op.create_table(
        "idempotency",
        Column("user", Text(64), primary_key=True),
        Column("key", Text(200), primary_key=True),
        Column("body_hash", Text(64), nullable=False),
        Column("job", Key, sa.ForeignKey("jobs.id"), nullable=False),
        Column("created_s", Real, nullable=False),
    )
