"""Accounts of users, and workers with several GPUs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("users", sa.Column("account", sa.String(64)))
    op.add_column("workers", sa.Column("more_gpus", sa.JSON))
