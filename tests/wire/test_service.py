"""What a job that has proved who it is may ask of the control service."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.wire.auth import new_secret
from shoal.wire.channel import Channel
from shoal.wire.messages import FetchFile, FileAnswer, Hello
from shoal.wire.service import PLACES, PLACES_OF_WORKER, ControlService


class NoProcesses:
    def start(self, job: str, worker: str) -> None: ...

    def stop(self, job: str, worker: str, kill: bool) -> None: ...


def test_a_job_has_a_bounded_number_of_connections_and_no_workers_that_were_not_started(
    tmp_path: Path,
) -> None:
    """Whoever has the job's secret may be as careless, or as hostile, as a stranger."""
    secret = new_secret()

    async def story() -> None:
        service = ControlService(NoProcesses())
        address = await service.start()
        handle = service.add("7", secret, was_started=lambda worker: worker == "7.0", files=tmp_path)

        def open_connection(number: int) -> Channel:
            channel = Channel.open(address, secret, "7", "worker")
            channel.send(Hello(f"7.{number}", 1))
            return channel

        def closes(channel: Channel) -> bool:
            try:
                channel.receive()
            except ConnectionError:
                return True
            return False

        known = await asyncio.to_thread(open_connection, 0)
        while "7.0" not in handle.state.workers:
            await asyncio.sleep(0.01)
        invented = await asyncio.to_thread(open_connection, 1)
        assert await asyncio.to_thread(closes, invented)
        assert list(handle.state.workers) == ["7.0"]
        silent = [
            await asyncio.to_thread(Channel.open, address, secret, "7", "files")
            for _ in range(PLACES + PLACES_OF_WORKER - 1)
        ]
        late = await asyncio.to_thread(Channel.open, address, secret, "7", "files")
        assert await asyncio.to_thread(closes, late)
        silent.pop().close()
        while len(service.listener.connections) > PLACES + PLACES_OF_WORKER - 1:
            await asyncio.sleep(0.01)
        again = await asyncio.to_thread(Channel.open, address, secret, "7", "files")
        again.send(FetchFile("job:none.pt"))
        assert isinstance(await asyncio.to_thread(again.receive), FileAnswer)
        for channel in (known, invented, late, again, *silent):
            channel.close()
        await service.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_service_that_stood_still_counts_that_time_against_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It read no messages meanwhile: the worker was not silent."""
    stood_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_s)
    monkeypatch.setattr("shoal.wire.service.time", clock)
    secret = new_secret()

    async def story() -> None:
        nonlocal stood_s
        service = ControlService(NoProcesses())
        address = await service.start()
        handle = service.add("7", secret)
        ticks: list[float] = []
        tick = handle.tick
        monkeypatch.setattr(handle, "tick", lambda: (tick(), ticks.append(clock.monotonic())))
        worker = await asyncio.to_thread(Channel.open, address, secret, "7", "worker")
        worker.send(Hello("7.0", 1))  # and nothing more
        while "7.0" not in handle.state.workers or not ticks:
            await asyncio.sleep(0.01)
        stood_s = 10 * handle.state.timing.heartbeat_timeout_s
        before = len(ticks)
        while len(ticks) == before:
            await asyncio.sleep(0.01)
        assert handle.state.workers["7.0"].alive
        # What it does not say from then on counts as ever.
        stood_s += handle.state.timing.heartbeat_timeout_s + 1.0
        tick()
        assert not handle.state.workers["7.0"].alive
        worker.close()
        await service.close()

    asyncio.run(asyncio.wait_for(story(), 60))
