"""Workers find the control plane again, whoever sits on its port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sqlite3
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shoal.agents.registry import AgentRegistry, KnownAgent
from shoal.executors.base import NamedAccount, NodeInfo
from shoal.server.control import Control
from shoal.server.home import Home
from shoal.server.loop.job_keys import JobKeys
from shoal.server.loop.runner import secrets_of
from shoal.server.machines import Machines
from shoal.server.options import Options, PortInUse
from shoal.torch.link import ControlLink
from shoal.wire.auth import JobKey, new_secret, read_key, write_secret
from shoal.wire.messages import Phase, Report, Status
from shoal.wire.service import ControlService
from shoal.wire.strangers import MAX_STRANGERS

from .fakes import Fleet, run, server
from .test_crash import RealServer


def addresses_of(port: int) -> set[str]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def test_agents_connect_where_they_are_told_to_and_the_server_listens_where_it_is_told_to(
    tmp_path: Path,
) -> None:
    async def story(options: Options) -> None:
        control = Control(options)
        machines = control.machines
        assert machines is not None
        await control.loop.start()
        machines.start(control.loop.elastic.service, lambda: None)
        await machines.wait_until_listening()
        assert machines.address == f"192.0.2.7:{machines.port}"
        assert addresses_of(machines.port) == {"127.0.0.3"}
        await control.close()

    run(story(Options(tmp_path, gpus=1, control_host="127.0.0.3", advertise="192.0.2.7")))
    run(story(Options(tmp_path, gpus=1)))  # as at the last start


class NoProcesses:
    def start(self, job: str, worker: str) -> None: ...

    def stop(self, job: str, worker: str, kill: bool) -> None: ...


async def listening(secret: bytes, port: int = 0) -> ControlService:
    service = ControlService(NoProcesses())
    await service.start("127.0.0.1", port)
    service.add("1", secret).set_target(["1.0"])
    return service


def link_to(address: str, secret: bytes, address_file: Path) -> ControlLink:
    return ControlLink(
        address, secret, "1", "1.0",
        on_order=lambda order: None, on_connected=lambda: None,
        status=lambda: Status(seq=1, phase=Phase.STARTING), report=Report, patience_s=60.0,
        address_file=str(address_file),
    )  # fmt: skip


def test_a_worker_follows_the_control_plane_to_another_port(tmp_path: Path) -> None:
    secret, file = new_secret(), tmp_path / "control"

    async def story() -> None:
        first = await listening(secret)
        link = link_to(first.address, secret, file)
        await asyncio.to_thread(link.start)
        port = int(first.address.rpartition(":")[2])
        await first.close()
        with contextlib.closing(
            socket.create_server(("127.0.0.1", port))
        ):  # another process, which never answers
            second = await listening(secret)
            file.write_text(second.address + "\n")
            while not second.jobs["1"].state.workers["1.0"].connected:
                await asyncio.sleep(0.02)
            link.close()
            await second.close()

    run(story())


@pytest.mark.parametrize("where", ["in the home", "in a shared directory", "for another account"])
def test_a_server_whose_port_was_taken_tells_its_workers_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, where: str
) -> None:
    """Also a job that waits: it would look there later, and find the address before the last."""
    base, home = tmp_path / "base", tmp_path / "home"
    monkeypatch.setenv("SHOAL_JOBS_DIR", str(base))
    base.mkdir()
    (tmp_path / "shared").mkdir()
    if where == "for another account":
        if os.geteuid() != 0:
            pytest.skip("only root runs jobs under other accounts")
        request.addfinalizer(partial(os.umask, os.umask(0o077)))
        monkeypatch.setattr(
            "shoal.server.services.accounts.Accounts.of", lambda self, user: NamedAccount("nobody")
        )
    shared = str(tmp_path / "shared") if where == "in a shared directory" else None

    async def story() -> None:
        fleet = Fleet(2)
        async with server(home, fleet=fleet, kill=True, shared=shared) as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
            file = Path(fleet.running[f"{job}.0"].env["SHOAL_CONTROL_FILE"])
            assert not file.exists()
            address = here.loop.elastic.service.address
        taken = another_process_at(address)
        async with server(home, fleet=fleet, kill=True, shared=shared) as here:
            taken.close()  # no worker waits there any more
            address = here.loop.elastic.service.address
            assert file.read_text().strip() == address
            assert any("is taken" in warning for warning in here.loop.warnings)
            await here.post(f"/jobs/{job}/pause")
            await here.until(lambda: not fleet.running, train=(job,))
        with contextlib.closing(another_process_at(address)):
            async with server(home, fleet=fleet, shared=shared) as here:
                assert file.read_text().strip() == here.loop.elastic.service.address != address
        if where == "for another account":
            assert (file.parent, file.stat().st_uid, file.stat().st_mode & 0o777) == (base, 0, 0o644)

    run(story())


def test_a_job_trains_on_while_another_process_has_the_port(tmp_path: Path) -> None:
    """With real workers. The state of jobs is in a shared directory."""
    (tmp_path / "shared").mkdir()
    script, result = Path(__file__).parents[2] / "bench" / "_count_samples.py", tmp_path / "result.json"
    live = RealServer(
        tmp_path / "home", "--gpus", "2", "--policy", "fifo", "--shared", str(tmp_path / "shared")
    )
    try:
        words = (sys.executable, str(script), "24", "4", "12", "1", str(result))
        job = int(live.submit(*words, gpus="2", resize="live")["id"])
        while (live.until(job, "running", timeout_s=120)["step"] or 0) < 3:
            time.sleep(0.05)
        port = control_port(tmp_path / "home")
        live.kill()
        with contextlib.closing(another_process_at(f"127.0.0.1:{port}")):
            live.up()
            while control_port(tmp_path / "home") == port:
                time.sleep(0.05)
            result.with_suffix(".json.hurry").touch()
            found = live.until(job, "succeeded", "failed", timeout_s=120)
        assert (found["state"], found["restarts"]) == ("succeeded", 0), found["message"]
        assert json.loads(result.read_text()) == [12.0]
        lost = live.http.get("/events", params={"job": job, "type": "worker.lost"}).json()["items"]
        assert lost == []
    finally:
        live.down()


def control_port(home: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{home}/shoal.db?mode=ro", uri=True)) as store:
        (found,) = store.execute("select value from settings where key = 'control_port'").fetchone()
    return int(found)


def another_process_at(address: str) -> socket.socket:
    """It never answers."""
    return socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))


def test_a_worker_is_not_shut_out_by_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """No idle connection ends by itself in time: the worker gets the place of one of them."""
    monkeypatch.setattr("shoal.wire.channel.HANDSHAKE_TIMEOUT_S", 3600.0)
    secret = new_secret()

    async def story() -> None:
        service = await listening(secret)
        host, _, port = service.address.rpartition(":")
        async with contextlib.AsyncExitStack() as stack:
            idle = [await idle_connection(host, int(port), stack) for _ in range(MAX_STRANGERS + 20)]
            ended = [await reader.read() for reader in idle[:20]]  # those that had to make room
            assert all(ended), "each got its challenge"
            assert len(service.listener.strangers) == MAX_STRANGERS
            while len(service.listener.connections) > MAX_STRANGERS:
                await asyncio.sleep(0.01)
            link = link_to(service.address, secret, Path("/nonexistent"))
            await asyncio.to_thread(link.start)
            while not service.jobs["1"].state.workers["1.0"].met:
                await asyncio.sleep(0.02)
            assert len(service.listener.strangers) == MAX_STRANGERS - 1
            link.close()
            await service.close()

    run(story())


async def idle_connection(host: str, port: int, stack: contextlib.AsyncExitStack) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection(host, port)
    stack.callback(writer.close)
    return reader


def test_a_job_that_changes_its_key_hinders_neither_the_server_nor_its_own_end(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(2)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("1..2", secrets={"KEY": "x"}))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
        directory = tmp_path / "jobs" / str(job)
        (directory / "secret").write_bytes(b"\xff\x00")
        (directory / "secrets.json").write_text("[")
        async with server(tmp_path, fleet=fleet) as here:
            assert any(f"the key of job {job} was replaced" in warning for warning in here.loop.warnings)
            assert secrets_of(directory) == {}
            (directory / "secrets.json").write_text('{"SHOAL_JOB_DIR": "/home/of/another", "KEY": "x"}')
            assert secrets_of(directory) == {"KEY": "x"}
            await here.post(f"/jobs/{job}/cancel")
            await here.until(lambda: here.state(job) == "cancelled")

    run(story())


@pytest.mark.parametrize("change", ["00", "\xff", "ab" * 32 + "\nof another"])
def test_a_key_that_a_job_changes_while_it_is_read_is_the_one_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    directory, warnings = tmp_path / "1", list[str]()

    def passed_on(keys: JobKeys) -> JobKey:
        key = JobKey.parse(keys.text(1, directory).encode())
        assert key.secret == keys.secret(1, directory)
        return key

    made = passed_on(JobKeys(warnings))
    assert made == read_key(directory / "secret")

    def read_and_change(path: Path) -> JobKey:
        key = read_key(path)
        path.write_text(change)
        return key

    monkeypatch.setattr("shoal.server.loop.job_keys.read_key", read_and_change)
    assert passed_on(JobKeys(warnings)) == made

    def write_and_change(path: Path, *key: bytes) -> None:
        write_secret(path, *key)
        path.write_text(change)

    monkeypatch.setattr("shoal.server.loop.job_keys.write_secret", write_and_change)
    (directory / "secret").unlink()
    assert b"CERTIFICATE" in passed_on(JobKeys(warnings)).pem
    assert not warnings


@pytest.mark.parametrize("what", ["pipe", "endless", "nothing"])
def test_a_job_that_replaces_its_key_or_removes_its_directory_does_not_keep_the_server_from_starting(
    tmp_path: Path, what: str
) -> None:
    async def story() -> None:
        fleet = Fleet(1)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("1..1", resize="live"))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
        directory = tmp_path / "jobs" / str(job)
        if what == "nothing":
            shutil.rmtree(directory)
        else:
            (directory / "secret").unlink()
        if what == "pipe":
            os.mkfifo(directory / "secret", 0o600)  # to open it would wait for a writer
        elif what == "endless":
            with (directory / "secret").open("wb") as file:
                os.truncate(file.fileno(), 1 << 40)
            (directory / "secret").chmod(0o600)
        async with server(tmp_path, fleet=fleet) as here:
            await here.post(f"/jobs/{job}/cancel")
            await here.until(lambda: here.state(job) == "cancelled")

    run(story())


def test_a_server_waits_for_the_port_where_its_agents_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not move: agents on other machines would never learn the new port."""
    monkeypatch.setattr("shoal.server.machines.RETRY_S", 0.01)
    monkeypatch.setattr("shoal.server.machines.LISTEN_S", 0.1)

    async def story() -> None:
        home = Home(tmp_path)
        home.take()
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
            port = int(other.getsockname()[1])
            AgentRegistry(tmp_path / "agents.json").remember("far", KnownAgent(secret_hash="x"))
            machines = Machines(home, virtual_gpus=1, last_port=port)
            told: list[str] = []
            machines.on_trouble = told.append
            machines.start(ControlService(NoProcesses()), lambda: told.append("listening"))
            while not told:
                await asyncio.sleep(0.01)
            assert f"port {port}, where agents connect" in machines.trouble
            assert "--control-port" in machines.trouble
            with pytest.raises(PortInUse, match=str(port)):
                await machines.wait_until_listening()
        while not machines.listening.done():
            await asyncio.sleep(0.01)
        assert (machines.port, machines.trouble) == (port, "")
        assert told[1:] == ["listening"], "it was said once"
        await machines.close()
        home.release()

    run(story())


def test_workers_of_other_machines_are_not_given_up_while_they_cannot_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agents would carry out the order to kill them as soon as they are back."""
    later_s = 0.0
    monkeypatch.setattr(
        "shoal.wire.service.time", SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    )

    async def story() -> None:
        nonlocal later_s
        here_or_there = NodeInfo("node", 2, "virtual", True)
        fleet = Fleet((here_or_there,))
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("2", resize="live"))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
        for worker in fleet.live.values():
            worker.end()  # its process trains, but has no connection
        fleet._nodes = (replace(here_or_there, remote=True),)
        async with server(tmp_path, fleet=fleet) as here:
            handle = here.loop.elastic.service.jobs[str(job)]
            here.control._others_cannot_connect("another process has the port")
            later_s += 3600.0
            handle.tick()
            assert all(view.alive for view in handle.state.workers.values())
            here.loop.elastic.await_machines(can_connect=True)
            later_s += handle.state.timing.restored_s - 1.0
            handle.tick()
            assert all(view.alive for view in handle.state.workers.values())
            later_s += 2.0
            handle.tick()
            await here.until(lambda: set(fleet.told) == {f"{job}.0", f"{job}.1"})

    run(story())


def test_a_server_without_agents_moves_to_a_free_port(tmp_path: Path) -> None:
    async def story() -> None:
        home = Home(tmp_path)
        home.take()
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
            machines = Machines(home, virtual_gpus=1, last_port=int(other.getsockname()[1]))
            machines.start(ControlService(NoProcesses()), lambda: None)
            await machines.wait_until_listening()
            assert machines.port != other.getsockname()[1]
            await machines.close()
        home.release()

    run(story())


def test_status_and_doctor_say_that_agents_cannot_connect(tmp_path: Path) -> None:
    live = RealServer(tmp_path / "home", "--gpus", "1", "--policy", "fifo")
    try:
        live.http.post("/join-tokens", json={}).raise_for_status()
        port = int(live.http.post("/join-tokens", json={}).json()["address"].rpartition(":")[2])
        live.kill()
        with contextlib.closing(socket.create_server(("127.0.0.1", port))):
            live.up()
            while not any("where agents connect" in w for w in live.http.get("/status").json()["warnings"]):
                time.sleep(0.05)
            checks = {check["name"]: check for check in live.http.get("/doctor").json()["checks"]}
            assert checks["agents' port"]["status"] == "error"
            assert "--control-port" in checks["agents' port"]["hint"]
        while any("where agents connect" in w for w in live.http.get("/status").json()["warnings"]):
            time.sleep(0.05)
        assert live.http.post("/join-tokens", json={}).json()["address"].endswith(f":{port}")
    finally:
        live.down()


def test_a_server_that_is_only_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first decision of a new installation compiles for longer than any limit here."""
    monkeypatch.setattr("shoal.server.machines.LISTEN_S", 0.001)

    async def story() -> None:
        home = Home(tmp_path)
        home.take()
        machines = Machines(home, virtual_gpus=1)
        waiting = asyncio.create_task(machines.wait_until_listening())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        machines.start(ControlService(NoProcesses()), lambda: None)
        await waiting
        await machines.close()
        home.release()

    run(story())
