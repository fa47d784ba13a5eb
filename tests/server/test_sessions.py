"""Sessions of the server: who may read them, and interactive jobs, which do not outlive their terminals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.agents.sessions import FleetSessions
from shoal.server.services import sessions as sv
from shoal.wire import agent_messages as am

from .fakes import Fleet, Here, run, server


class Agent:
    """The agent of all workers. It notes what it is told."""

    def __init__(self, here: Here) -> None:
        self.told: list[am.ToSession] = []
        self.fleet = FleetSessions(lambda worker: "a", lambda agent, message: self.told.append(message))
        here.control.sessions._fleet = self.fleet

    def says(self, message: am.SessionOutput | am.SessionEnded) -> None:
        self.fleet.received("a", message)


async def _running(here: Here, **spec: Any) -> int:
    job = (await here.post("/jobs", json={"command": ["x"], "workdir": "/tmp", **spec}, status=201))["id"]
    await here.until(lambda: here.state(job) == "running")
    return int(job)


def test_a_session_is_passed_on_to_the_agent_and_belongs_to_who_opened_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            job, agent = await _running(here), Agent(here)
            name = (await here.post(f"/jobs/{job}/exec", json={"command": ["ls", "-l"]}, status=201))["id"]
            assert agent.told == [am.SessionOpen(name, f"{job}.0", ("ls", "-l"), False, 24, 80)]
            agent.says(am.SessionOutput(name, b"hello"))
            first = await here.get(f"/sessions/{name}/output")
            assert (first["data"], first["next"], first["exit_code"]) == ("aGVsbG8=", 5, None)
            await here.get(f"/sessions/{name}/output", user="ada", status=404)
            for data in ("x", "Ò"):
                await here.post(f"/sessions/{name}/input", json={"data": data}, status=422)
            await here.post(f"/sessions/{name}/input", json={"data": "bHMK"}, status=204)
            assert agent.told[-1] == am.SessionInput(name, b"ls\n")
            agent.says(am.SessionEnded(name, 3))
            last = await here.get(f"/sessions/{name}/output?after=5")
            assert (last["data"], last["exit_code"]) == ("", 3)
            assert here.state(job) == "running", "only an interactive job ends with its session"

    run(story())


def test_an_interactive_job_of_an_earlier_server_ends_if_nobody_uses_it(tmp_path: Path) -> None:
    """Its terminal may have gone with the server: without this it would hold its GPUs for ever."""

    async def story() -> None:
        fleet = Fleet(4)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job, other = await _running(here, interactive=True), await _running(here)
        async with server(tmp_path, fleet=fleet) as here:
            here.control.sessions.begin()
            assert here.control.sessions._task is not None
            here.control.sessions.look()
            assert here.state(job) == "running", "its terminal may come back"
            later_s = here.control.loop.now_s() + sv.SILENT_S + 1
            here.control.sessions._loop = _At(here, later_s)
            here.control.sessions.look()
            await here.until(lambda: here.state(job) == "cancelled")
            assert here.state(other) == "running"

    run(story())


class _At:
    """The control loop at another time."""

    def __init__(self, here: Here, now_s: float) -> None:
        self.jobs, self._now_s = here.control.loop.jobs, now_s

    def now_s(self) -> float:
        return self._now_s
