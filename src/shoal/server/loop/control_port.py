"""The port at which live jobs' workers reach the control plane, over restarts and upgrades of the server.

A restarted server listens on the same port, so that its workers reconnect. After an upgrade that changed the protocol,
the workers of the earlier version still know the old port and speak the old protocol there (`shoal.wire.previous`). If
only what workers send each other has changed, they reconnect as ever, but must not meet workers of this version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.server.api.models import Resize
from shoal.server.loop.live_job import LiveJob
from shoal.server.store.store import Store
from shoal.wire.atomic_file import write_atomically
from shoal.wire.messages import PEER_PROTOCOL, PROTOCOL
from shoal.wire.previous import CHECKPOINT_VERSION, PREVIOUS_PROTOCOL
from shoal.wire.service import ControlService


class ControlPort:
    """Opens the ports of the service. One setting of the store says which ones they are."""

    def __init__(self, service: ControlService, store: Store, warnings: list[str]) -> None:
        self._service, self._store, self._warnings = service, store, warnings
        #: Workers of an earlier version, of which this one keeps its own apart.
        self._earlier: frozenset[str] = frozenset()
        #: Whether they speak the previous protocol also with the control plane.
        self.speaks_previous = False

    async def open(
        self, host: str, jobs: Mapping[int, LiveJob], file_of: Callable[[LiveJob], Path], now_s: float
    ) -> None:
        """`file_of`: where the workers of a job look for an address that is not the one they were given."""
        port, previous = self._recorded(jobs.values())
        if previous["workers"] and previous["port"]:
            await self._listen_for_previous(host, previous["port"])
        # Also of jobs that wait: their files may name an address from an earlier change.
        files = {
            file_of(job) for job in jobs.values() if job.resize is Resize.LIVE and job.coordinator is not None
        }
        try:
            address = await self._service.start(host, port)
        except OSError as error:
            self._warnings.append(f"port {port} of the control channel is taken ({error.strerror})")
            address = await self._service.start(host, 0)
            for file in files:
                with contextlib.suppress(OSError):  # a job that removed its directory has itself to blame
                    write_atomically(file, address + "\n", mode=0o644)
        self._earlier, self.speaks_previous = frozenset(previous["workers"]), bool(previous["port"])
        with self._store.change(now_s) as change:
            change.put("control_port", int(address.rpartition(":")[2]))
            change.put("control_protocol", PROTOCOL)
            change.put("peer_protocol", PEER_PROTOCOL)
            change.put("checkpoint_version", CHECKPOINT_VERSION)
            change.put("previous_control", previous)

    def has_earlier(self, job: LiveJob) -> bool:
        """Whether the job has workers of an earlier version, with which those of this version cannot train."""
        return not self._earlier.isdisjoint(job.workers)

    def _recorded(self, jobs: Iterable[LiveJob]) -> tuple[int, dict[str, Any]]:
        """(the port of this protocol, workers of an earlier version and the port where they speak the previous one).

        Port 0: they speak this protocol. The first versions wrote no number of either protocol.
        """
        live = sorted(w for job in jobs if job.resize is Resize.LIVE for w in job.workers)
        port = int(self._store.get("control_port", 0))
        if self._store.get("control_protocol", PREVIOUS_PROTOCOL) != PROTOCOL:
            return 0, {"port": port, "workers": live}
        before = self._store.get("previous_control") or {"port": 0, "workers": []}
        if self._store.get("peer_protocol", 1) != PEER_PROTOCOL:
            return port, {"port": before["port"], "workers": live}
        return port, {"port": before["port"], "workers": [w for w in before["workers"] if w in live]}

    async def _listen_for_previous(self, host: str, port: int) -> None:
        try:
            await self._service.listen_for_previous(host, port)
        except OSError as error:
            self._warnings.append(
                f"port {port} is taken ({error.strerror}): workers of the earlier version cannot be asked to save "
                "their state, and their jobs go on from their last checkpoints"
            )
