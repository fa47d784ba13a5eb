"""Limits of users, groups, arrays of jobs, and webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
Column, Text, Json, Int, Real = sa.Column, sa.String, sa.JSON, sa.Integer, sa.Double


def upgrade() -> None:
    op.add_column("users", Column("group", Text(64)))
    op.add_column("users", Column("limits", Json))
    op.add_column("jobs", Column("array", Key))
    op.add_column("jobs", Column("array_index", Int))
    op.create_index("jobs_array", "jobs", ["array"])
    op.create_table(
        "groups",
        Column("name", Text(64), primary_key=True),
        Column("tickets", Real),
        Column("limits", Json),
        Column("created_s", Real, nullable=False),
    )
    op.create_table(
        "arrays",
        Column("id", Key, primary_key=True, autoincrement=True),
        Column("name", Text(64), nullable=False),
        Column("user", Text(64), nullable=False),
        Column("tasks", Int, nullable=False),
        Column("max_running", Int),
        Column("created_s", Real, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("arrays_name", "arrays", ["name"])
    op.create_table(
        "webhooks",
        Column("id", Key, primary_key=True, autoincrement=True),
        Column("user", Text(64), sa.ForeignKey("users.name"), nullable=False),
        Column("url", sa.Text, nullable=False),
        Column("format", Text(8), nullable=False),
        Column("events", Json, nullable=False),
        Column("secret", Text(100), nullable=False),
        Column("cursor", Key, nullable=False),
        Column("attempts", Int, nullable=False),
        Column("next_s", Real),
        Column("sent", Int, nullable=False),
        Column("dropped", Int, nullable=False),
        Column("last_error", sa.Text),
        Column("created_s", Real, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhooks_user", "webhooks", ["user"])
