"""Upgrade a store to the schema of this version: forward only, after a backup, and never from a newer version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from shoal.core.errors import ShoalError
from shoal.server.home import NewerHome


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def latest_revision() -> str:
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def migrate(engine: sa.Engine, where: str) -> str | None:
    """Upgrade the store that `engine` opens. Gives the copy's path if one was made. `where` is for messages."""
    config, head = _config(), latest_revision()
    with engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
        fresh = current is None and not sa.inspect(connection).get_table_names()
    if current == head:
        return None
    known = {s.revision for s in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known:
        raise NewerHome(
            f"the store of {where} has schema {current!r}, newer than this version's {head!r}; "
            f"upgrade shoal, or give another --home"
        )
    if current is None and not fresh:
        raise ShoalError(f"the database of {where} holds other tables already; give one that is empty")
    copy = None if fresh else _copy(engine, head)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return copy


def _copy(engine: sa.Engine, revision: str) -> str | None:
    """SQLite's own online copy. A PostgreSQL store is the operator's to back up."""
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return None
    path = f"{engine.url.database}.before-{revision}"
    with sqlite3.connect(engine.url.database) as source, sqlite3.connect(path) as target:
        source.backup(target)
    return path
