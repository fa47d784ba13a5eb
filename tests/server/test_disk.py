"""A full disk: it is said, nothing acknowledged is lost, and things go on when there is room again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.server.store.store import StoreFull
from shoal.wire.channel import AsyncChannel

from .fakes import run, server


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    mount = tmp_path / "small"
    mount.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)], capture_output=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=False)


def fill(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass


def test_a_full_disk_is_said_jobs_run_on_and_nothing_is_lost(small: Path) -> None:
    async def story() -> None:
        async with server(small / "home") as here:
            kept = [(await here.submit("1"))["id"] for _ in range(3)]
            await here.until(lambda: len(here.fleet.running) == 3)
            fill(small / "filler")
            refused = 0
            for _ in range(50):  # what is left in already allocated pages may still be used
                reply = await here.http.post(
                    "/api/v1/jobs",
                    json={"command": ["x"], "env": {"A": "y" * 3000}},
                    headers={"Authorization": f"Bearer {here.tokens['admin']}"},
                )
                if reply.status_code == 201:
                    kept.append(reply.json()["id"])
                else:
                    assert reply.status_code == 507, reply.text
                    assert reply.json()["error"]["code"] == "disk_full"
                    refused += 1
            assert refused > 0
            # A worker ends meanwhile; that is taken in once it can be written down.
            here.fleet.end(f"{kept[0]}.0")
            for _ in range(10):
                await here.get("/jobs", status=200)
            assert f"{kept[1]}.0" in here.fleet.running
            (small / "filler").unlink()
            here.loop.reconciler.flush()
            await here.until(lambda: here.state(kept[0]) == "succeeded")
            assert {j["id"] for j in here.control.store.jobs(limit=1000)} == set(kept)
            kept.append((await here.submit("1"))["id"])
            assert here.loop.outbox.trouble is None

    run(story())


def test_a_live_job_gets_no_orders_until_they_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []
    send = AsyncChannel.send

    def recorded(channel: AsyncChannel, message: Any) -> None:
        orders.append(message)
        send(channel, message)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise StoreFull("the disk is full")

    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
            handle = here.loop.elastic.service.jobs[str(job)]
            monkeypatch.setattr(AsyncChannel, "send", recorded)
            with monkeypatch.context() as disk:
                disk.setattr(here.control.store, "change", full)
                handle.set_target([])
                handle.tick()
                assert orders == []
            handle.tick()
            assert orders
            assert here.control.store.job(job)["coordinator"] == handle.state.to_dict()

    run(story())
