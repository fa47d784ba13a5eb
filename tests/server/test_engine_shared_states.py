"""The state of jobs in a directory apart from the home: who writes there, and how it is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.errors import ShoalError
from shoal.executors.base import NodeInfo

from .fakes import Fleet, Here, run, server

NODES = tuple(NodeInfo(name, 1, "virtual", True, remote=True) for name in ("sharing", "apart"))


def state_directories(here: Here, job: int) -> dict[str, str | None]:
    """Where the workers of a job may write its state, by node."""
    return {
        w.node: w.env.get("SHOAL_STATE_DIR")
        for w in here.fleet.running.values()
        if w.env["SHOAL_JOB"] == str(job)
    }


async def trained(here: Here, gpus: int) -> int:
    # What the probe of the agents finds: only one of the machines shares the directory.
    here.loop._parts.addresses.shares_state = lambda node: node == "sharing"
    job: int = (await here.submit(str(gpus), resize="live"))["id"]
    await here.until(lambda: here.gpus(job) == gpus, train=(job,))
    return job


def test_machines_that_share_the_directory_write_there_and_it_is_remembered(tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    shared.mkdir()

    async def story() -> None:
        async with server(home, fleet=Fleet(NODES), shared=str(shared)) as here:
            job = await trained(here, 2)
            found = state_directories(here, job)
            assert found["apart"] is None, "its state goes through the control plane"
            first = Path(found["sharing"] or "")
            assert first.parent.parent == shared
            assert first.stat().st_mode & 0o777 == 0o700
            assert first.parent.stat().st_mode & 0o777 == 0o700
        async with server(home, fleet=Fleet(NODES)) as here:
            assert here.control.home.states == first.parent
            assert here.control.home.state(job) == first

    run(story())


def test_a_job_keeps_the_directory_in_which_it_began(tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    shared.mkdir()

    async def story() -> None:
        fleet = Fleet(NODES)
        async with server(home, fleet=fleet) as here:
            old = await trained(here, 1)
            assert state_directories(here, old) == {"sharing": str(home / "jobs" / str(old))}
        async with server(home, fleet=fleet, shared=str(shared)) as here:
            new = await trained(here, 1)
            assert here.control.home.state(old) == home / "jobs" / str(old)
            moved = here.control.home.state(new)
            assert moved.parent.parent == shared
            # Its new workers do not write to the home: nobody was asked whether they share it this time.
            await here.post(f"/jobs/{old}/pause")
            await here.until(lambda: not state_directories(here, old), train=(old,))
            await here.post(f"/jobs/{old}/resume")
            await here.until(lambda: here.gpus(old) == 1, train=(old,))
            assert state_directories(here, old) == {"sharing": None}
        async with server(home, fleet=Fleet(NODES), shared="none") as here:
            assert here.control.home.state(new) == moved
            assert here.control.home.states == home / "jobs"

    run(story())


def test_a_directory_that_cannot_be_used_is_refused_and_not_remembered(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(ShoalError, match=r"cannot keep the state of jobs in .*absent.*No such file"):
            async with server(tmp_path / "home", shared=str(tmp_path / "absent")):
                pass
        async with server(tmp_path / "home") as here:
            assert here.control.home.shared is None

    run(story())
