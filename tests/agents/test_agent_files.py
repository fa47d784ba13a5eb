"""Files of agents: uploaded directories and the proof of sharing, over TLS, and what a job may have changed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from shoal.agents.fleet import AgentExecutor
from shoal.agents.registry import AgentRegistry
from shoal.agents.services import AgentServices
from shoal.agents.shared import SharedProof, Sharing
from shoal.client.workdir import packed
from shoal.executors.base import Exit, WorkerSpec

from .test_agents import Cluster, until


def test_an_agent_fetches_a_directory_once_and_proves_what_it_shares(
    tmp_path: Path,
) -> None:
    top, jobs = tmp_path / "project", tmp_path / "state"
    top.mkdir()
    jobs.mkdir()
    (top / "train.sh").write_text("cat data; pwd")
    (top / "data").write_text("x" * 3_000_000 + "\n")  # several parts
    (top / ".shoalignore").write_text("secret\n")
    (top / "secret").write_text("")
    with packed(top, 10**9) as found:
        archive = tmp_path / f"{found.digest}.tar"
        archive.write_bytes(found.archive.read())
    asked: list[str] = []

    def find(digest: str) -> Path | None:
        asked.append(digest)
        return archive if digest == found.digest else None

    async def story() -> None:
        cluster = Cluster(tmp_path)
        await cluster.up()
        cluster.executor.services = AgentServices(find, SharedProof(jobs), lambda: (cluster.address,))
        try:
            cluster.agent("a", "127.0.0.2")
            await cluster.node("a")
            cluster.start("1.0", "a", "wc -c <data; pwd; ls -a", tree=found.digest)
            cluster.start("1.1", "a", "sh train.sh | wc -c", tree=found.digest)
            cluster.start("2.0", "a", "true", tree="0" * 64)
            await until(lambda: len(cluster.exits) == 3)
            assert cluster.exits["1.0"].ok
            size, where, *names = cluster.lines("1.0")
            assert size == "3000001"
            assert Path(where) == tmp_path / "a" / "workdirs" / "1" / found.digest
            assert "secret" not in names
            assert cluster.exits["1.1"].ok
            assert asked.count(found.digest) == 3, "one transfer of three parts for both workers"
            assert not cluster.exits["2.0"].began
            assert "submit the job again" in cluster.exits["2.0"].why
            await until(lambda: cluster.executor.services.sharing("a") == Sharing(True))
            assert cluster.executor.services.unreachable["a"] == {}
        finally:
            await cluster.down()

    asyncio.run(asyncio.wait_for(story(), 120))


@pytest.mark.parametrize("what", ["pipe", "link", "noise", "its directory"])
def test_what_a_job_puts_in_the_place_of_its_workers_node_stops_no_server(tmp_path: Path, what: str) -> None:
    directory, other = tmp_path / "workers" / "1.0", tmp_path / "other"
    directory.mkdir(parents=True)
    other.write_text("a")
    if what == "pipe":
        os.mkfifo(directory / "node")  # to open it would wait for a writer
    elif what == "link":
        (directory / "node").symlink_to(other)
    elif what == "noise":
        (directory / "node").write_bytes(b"\xff")
    else:
        directory.rmdir()
        directory.symlink_to(tmp_path)

    async def story() -> None:
        executor = AgentExecutor(AgentRegistry(tmp_path / "agents.json"))
        exits: asyncio.Queue[Exit] = asyncio.Queue()
        executor.on_exit = exits.put_nowait
        executor.adopt("1.0", directory)
        executor.start(WorkerSpec("1.0", directory, "a", 0, ("true",), "/", {}))
        for why in ("it was ended before it began", "cannot start it: File exists"):
            ended = await exits.get()
            assert (ended.began, ended.why) == (False, why)
        executor.close()

    asyncio.run(story())
    assert other.read_text() == "a"
    assert not (tmp_path / "node").exists()
