"""The state of jobs in a directory apart from the home: who writes there, and how it is remembered."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.agents.link import MemoryLink
from shoal.agents.main import versions
from shoal.agents.shared import answer_probe
from shoal.core.errors import ShoalError
from shoal.executors.base import NodeInfo
from shoal.server.control import Control
from shoal.server.options import Options
from shoal.wire import agent_messages as am
from shoal.wire.job_files import JobFiles

from .fakes import Fleet, Here, run, server

NODES = tuple(NodeInfo(name, 1, "virtual", True, remote=True) for name in ("sharing", "apart"))


def state_directories(here: Here, job: int) -> dict[str, str | None]:
    """Where the workers of a job may write its state, by node."""
    return {
        w.node: w.env.get("SHOAL_STATE_DIR")
        for w in here.fleet.running.values()
        if w.env["SHOAL_JOB"] == str(job)
    }


def state_of(here: Here, job: int) -> Path:
    """Where the control plane reads and writes the state of a job."""
    files: JobFiles = here.loop.elastic.service.jobs[str(job)]._files
    return files.directory


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
            assert state_of(here, job) == first

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
            assert state_of(here, old) == home / "jobs" / str(old)
            moved = state_of(here, new)
            assert moved.parent.parent == shared
            # Its new workers do not write to the home: nobody was asked whether they share it this time.
            await here.post(f"/jobs/{old}/pause")
            await here.until(lambda: not state_directories(here, old), train=(old,))
            await here.post(f"/jobs/{old}/resume")
            await here.until(lambda: here.gpus(old) == 1, train=(old,))
            assert state_directories(here, old) == {"sharing": None}
        async with server(home, fleet=Fleet(NODES), shared="none") as here:
            assert state_of(here, new) == moved
            assert here.control.home.states == home / "jobs"

    run(story())


def test_a_job_cannot_lead_the_server_to_the_state_of_another_by_a_link(tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    shared.mkdir()

    async def story() -> None:
        fleet = Fleet(NODES)
        async with server(home, fleet=fleet, kill=True) as here:
            other, job = await trained(here, 1), await trained(here, 1)
            link = home / "jobs" / str(job) / "state"
            link.symlink_to(home / "jobs" / str(other))
        async with server(home, fleet=fleet, shared=str(shared), kill=True) as here:
            assert state_of(here, job) == home / "jobs" / str(job)
            # As if an earlier version had recorded nothing.
            states = here.control.home.states
            here.loop.jobs[job].state_directory = None
            here.loop.outbox.job(here.loop.jobs[job])
            here.loop.outbox.flush()
        for target, is_followed in (
            (states / f"{other}-00000000", False),
            (states / f"{job}-00000000x", False),
            (home / f"{job}-00000000", False),
            (states / f"{job}-00000000", True),
        ):
            target.mkdir(exist_ok=True)
            link.unlink()
            link.symlink_to(target)
            assert (here.control.home.linked_state(job) == target) is is_followed, target
        async with server(home, fleet=fleet) as here:
            assert state_of(here, job) == target, "that of an earlier version is found again"
            assert here.loop.jobs[job].state_directory == str(target)

    run(story())


def test_a_directory_that_cannot_be_used_is_refused_and_not_remembered(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(ShoalError, match=r"cannot keep the state of jobs in .*absent.*No such file"):
            async with server(tmp_path / "home", shared=str(tmp_path / "absent")):
                pass
        async with server(tmp_path / "home") as here:
            assert here.control.home.shared is None

    run(story())


async def joined(control: Control, name: str, directory: Path | None = None) -> MemoryLink:
    """An agent that was asked what it shares. On its machine, `directory` is at the path of the probe."""
    ours, theirs = MemoryLink.pair()
    assert control.machines is not None
    control.machines.executor.embed(theirs)
    node = am.NodeFacts(name, 1, "virtual", True)
    ours.send(am.AgentHello(name, "run", (node,), 0.0, time.time(), versions=versions()))
    while not isinstance(asked := await ours.receive(), am.Probe):
        pass
    there = asked if directory is None else msgspec.structs.replace(asked, directory=str(directory))
    ours.send(msgspec.structs.replace(answer_probe(there), directory=asked.directory))
    while control.machines.executor.services.sharing(name) is None:
        await asyncio.sleep(0.01)
    return ours


def test_a_machine_with_another_directory_at_the_shared_path_is_named_where_people_look(
    tmp_path: Path,
) -> None:
    shared, copied = tmp_path / "shared", tmp_path / "copied"
    shared.mkdir()

    async def story() -> None:
        control = Control(Options(tmp_path / "home", gpus=1, shared=str(shared)))
        assert control.machines is not None
        control.make_admin()
        control._serve_agents(control.machines)
        await control.loop.start()
        states = control.home.states
        shutil.copytree(states, copied)
        links = [await joined(control, "gpu7"), await joined(control, "gpu8", copied)]
        transport = httpx.ASGITransport(control.app)
        admin = {"Authorization": f"Bearer {control.home.admin_token.read_text().strip()}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as http:
            nodes = (await http.get("/nodes", headers=admin)).json()["items"]
            doctor = (await http.get("/doctor", headers=admin)).json()
        warnings = {n["name"]: n["warnings"] for n in nodes if n["name"] != "local"}
        words = f"it does not share {states} (what it writes to {states} does not appear here)"
        assert warnings["gpu7"] == []
        assert [w.partition(":")[0] for w in warnings["gpu8"]] == [words]
        (check,) = [check for check in doctor["checks"] if check["name"] == "shared directory"]
        assert check["status"] == "error"
        assert f"gpu8: {words}" in check["message"]
        assert "gpu7" not in check["message"]
        assert not control.machines.shares_state("gpu8"), "the state of its jobs goes through the server"
        assert control.machines.shares_state("gpu7")
        for link in links:
            link.close()
        await control.close()

    run(story())
