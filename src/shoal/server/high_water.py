"""The id of the newest event, in a file beside the database: it shows that a database is an older backup.

Clients continue after the last event they know, so no id of an event may be given twice. One number is enough for the
other tables that count their rows: whatever adds a row to them also adds an event.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shoal.server.store import tables as t
from shoal.server.store.store import Store

COUNTED = (t.events, t.jobs, t.arrays, t.tokens, t.webhooks)


class HighWater:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int:
        """0 if there is none, or if it was damaged."""
        text = os.pread(self._file, 40, 0).strip()
        return int(text) if text.isdigit() else 0

    def write(self, event: int) -> None:
        """Costs microseconds: it need not survive a power failure."""
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._file, b"%020d\n" % event, 0)

    def close(self) -> None:
        os.close(self._file)


def continue_ids(store: Store, mark: HighWater, now_s: float) -> int:
    """Give no id twice that was given after the backup. Return how many events the database lacks."""
    lacks = mark.read() - store.last_event_id
    if lacks <= 0:
        return 0
    with store.change(now_s) as change:
        for table in COUNTED:
            change.leave_out_ids(table, lacks)
    return lacks
