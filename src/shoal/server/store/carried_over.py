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
        protocol = _setting(connection, "control_protocol") or _unnumbered_protocol(connection)
        checkpoint = _setting(connection, "checkpoint_version")
        if checkpoint is None and protocol < PREVIOUS_PROTOCOL:
            checkpoint = protocol  # the states of that time have no number, and none is read
        running = _count(connection, "j.id in (select w.job from workers w where w.ended_s is null)")
        saved = _count(connection, "j.coordinator is not null")
    if checkpoint is not None and checkpoint not in READABLE_CHECKPOINTS and saved:
        raise CannotCarryOver(
            f"{counted(saved, 'live job')} of {where} may have saved states of version {checkpoint}, which this "
            "version does not read; nothing was changed: let them end with the version that wrote this home"
        )
    if protocol not in (PROTOCOL, PREVIOUS_PROTOCOL) and running:
        raise CannotCarryOver(
            f"{counted(running, 'live job')} of {where} {'runs' if running == 1 else 'run'} with protocol {protocol}, "
            f"and this version speaks {PROTOCOL} and {PREVIOUS_PROTOCOL}; nothing was changed: start the version that "
            "wrote this home and pause the jobs (`shoal pause`), or upgrade over the version in between"
        )


def _unnumbered_protocol(connection: sa.Connection) -> int:
    """Versions up to protocol 3 did not write its number. What they saved of their jobs shows it."""
    query = sa.text(f"select j.coordinator from jobs j where {_UNFINISHED} and j.coordinator is not null")
    found = [_plain(saved) for saved in connection.execute(query).scalars()]
    states = [saved for saved in found if isinstance(saved, dict)]
    if any("untold" not in saved for saved in states):
        return 1
    workers = [worker for saved in states for worker in saved["workers"].values()]
    return 2 if any("why" not in worker for worker in workers) else PREVIOUS_PROTOCOL


def _setting(connection: sa.Connection, key: str) -> Any:
    found = connection.execute(sa.text("select value from settings where key = :key"), {"key": key}).scalar()
    return _plain(found)


def _plain(found: Any) -> Any:
    """Of a column of JSON: one driver decodes it, the other does not."""
    return json.loads(found) if isinstance(found, str) else found


_UNFINISHED = "j.resize = 'live' and j.finished_s is null"


def _count(connection: sa.Connection, condition: str) -> int:
    query = sa.text(f"select count(*) from jobs j where {_UNFINISHED} and {condition}")
    return int(connection.execute(query).scalar() or 0)
