"""Whether this version can carry over the live jobs of the version that wrote a store: asked before it changes."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from shoal.core.errors import ShoalError
from shoal.core.words import counted
from shoal.wire.messages import PROTOCOL
from shoal.wire.previous import PREVIOUS_PROTOCOL, READABLE_CHECKPOINTS


class CannotCarryOver(ShoalError):
    """Jobs of this store would be lost with this version."""

    exit_code = 5


def refuse_what_cannot_be_carried_over(engine: sa.Engine, where: str) -> None:
    with engine.connect() as connection:
        if not {"settings", "jobs", "workers"} <= set(sa.inspect(connection).get_table_names()):
            return
        protocol = _setting(connection, "control_protocol", PREVIOUS_PROTOCOL)
        checkpoint = _setting(connection, "checkpoint_version", None)
        running = _count(connection, "j.id in (select w.job from workers w where w.ended_s is null)")
        saved = _count(connection, "j.coordinator is not null")
    if protocol not in (PROTOCOL, PREVIOUS_PROTOCOL) and running:
        raise CannotCarryOver(
            f"{counted(running, 'live job')} of {where} {'runs' if running == 1 else 'run'} with protocol {protocol}, "
            f"and this version speaks {PROTOCOL} and {PREVIOUS_PROTOCOL}; nothing was changed: start the version that "
            "wrote this home and pause the jobs (`shoal pause`), or upgrade over the version in between"
        )
    if checkpoint is not None and checkpoint not in READABLE_CHECKPOINTS and saved:
        raise CannotCarryOver(
            f"{counted(saved, 'live job')} of {where} may have saved states of version {checkpoint}, which this "
            "version does not read; nothing was changed: let them end with the version that wrote this home"
        )


def _setting(connection: sa.Connection, key: str, default: Any) -> Any:
    found = connection.execute(sa.text("select value from settings where key = :key"), {"key": key}).scalar()
    return default if found is None else json.loads(found) if isinstance(found, str) else found


def _count(connection: sa.Connection, condition: str) -> int:
    unfinished = "j.resize = 'live' and j.finished_s is null"
    query = sa.text(f"select count(*) from jobs j where {unfinished} and {condition}")
    return int(connection.execute(query).scalar() or 0)
