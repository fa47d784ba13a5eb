"""Uploaded directories on a machine: fetched once, verified, unpacked safely, evicted when unused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import pwd
import tarfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.agents import trees
from shoal.agents.prepared import PreparingExecutor, job_of
from shoal.agents.trees import TreeError, TreeFetcher, Workdirs, unpack
from shoal.client.workdir import packed
from shoal.executors.base import Exit, NamedAccount, RunAs, WorkerSpec
from shoal.wire import agent_messages as am


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


class Control:
    """The control plane's end: answers each request with one part, when it is told to."""

    def __init__(self, *archives: bytes, part_bytes: int = 100) -> None:
        self.archives = {hashlib.sha256(a).hexdigest(): a for a in archives}
        self.part_bytes, self.asked = part_bytes, list[am.FetchTree]()
        self.fetcher: TreeFetcher | None = None
        self.answers = True

    def send(self, request: am.FetchTree) -> None:
        self.asked.append(request)
        if self.answers:
            asyncio.get_running_loop().call_soon(self.answer, request)

    def answer(self, request: am.FetchTree) -> None:
        assert self.fetcher is not None
        self.fetcher.received(self.part(request))

    def part(self, request: am.FetchTree) -> am.TreePart:
        content = self.archives.get(request.digest)
        if content is None:
            return am.TreePart(request.digest, request.begin, why="it is not here any more")
        data = content[request.begin : request.begin + self.part_bytes]
        return am.TreePart(request.digest, request.begin, len(content), data)


def archive(tmp_path: Path, **files: str) -> bytes:
    top = tmp_path / f"top-{len(files)}-{hash(tuple(files.items())) & 0xFFFF}"
    top.mkdir()
    for name, text in files.items():
        (top / name).write_text(text)
    with packed(top, 10**6) as found:
        return found.archive.read()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def made(tmp_path: Path, control: Control, **options: Any) -> tuple[TreeFetcher, Workdirs, set[str]]:
    state, used = tmp_path / "state", set[str]()
    fetcher = TreeFetcher(state / "trees", control.send)
    control.fetcher = fetcher
    return fetcher, Workdirs(state, fetcher, lambda: used, **options), used


def test_workers_of_one_machine_share_one_transfer_and_each_job_has_its_own_copy(tmp_path: Path) -> None:
    content = archive(tmp_path, train="print(1)", data="x" * 3000)
    control = Control(content)

    async def story() -> None:
        _, workdirs, _ = made(tmp_path, control)
        found = await asyncio.gather(*(workdirs.prepare(job, digest(content)) for job in ("1", "1", "2")))
        assert found[0] == found[1] != found[2]
        assert [(p / "train").read_text() for p in found] == ["print(1)"] * 3
        assert [r.begin for r in control.asked].count(0) == 1, "it was fetched once"
        (found[0] / "train").write_text("changed by job 1")
        assert (await workdirs.prepare("3", digest(content)) / "train").read_text() == "print(1)"
        assert [r.begin for r in control.asked].count(0) == 1, "also for a later job"

    run(story())


def test_a_transfer_goes_on_after_a_broken_connection_and_ignores_late_answers(tmp_path: Path) -> None:
    content = archive(tmp_path, data="x" * 3000)
    control = Control(content)

    async def story() -> None:
        fetcher, workdirs, _ = made(tmp_path, control)
        control.answers = False
        task = asyncio.create_task(workdirs.prepare("1", digest(content)))
        while not control.asked:
            await asyncio.sleep(0)
        control.answer(control.asked[0])
        late = control.part(control.asked[0])
        fetcher.connected()
        assert [r.begin for r in control.asked] == [0, 100, 100], "requested again from where it was"
        fetcher.received(late)
        control.answers = True
        control.answer(control.asked[-1])
        assert ((await task) / "data").read_text() == "x" * 3000

    run(story())


def test_what_arrives_changed_or_is_absent_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    content = archive(tmp_path, data="x" * 300)
    control = Control(content)
    control.archives[digest(content)] = content[:-5] + b"wrong"

    async def story() -> None:
        fetcher, workdirs, _ = made(tmp_path, control)
        with pytest.raises(TreeError, match="did not arrive as it was uploaded"):
            await workdirs.prepare("1", digest(content))
        with pytest.raises(TreeError, match="not here any more"):
            await workdirs.prepare("1", "0" * 64)
        assert not list((tmp_path / "state" / "trees").iterdir())
        control.archives[digest(content)] = content
        await workdirs.prepare("1", digest(content))
        assert fetcher.path(digest(content)).exists()

    run(story())


BAD = {
    "a name that climbs": ("../evil", tarfile.REGTYPE, "leads out of it"),
    "an absolute name": ("/tmp/evil", tarfile.REGTYPE, "leads out of it"),
    "a hard link": ("a", tarfile.LNKTYPE, "no file, directory or symbolic link"),
    "a device": ("a", tarfile.CHRTYPE, "no file, directory or symbolic link"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_dangerous_archive_is_refused(tmp_path: Path, case: str) -> None:
    name, kind, words = BAD[case]
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info, io.BytesIO())
    with pytest.raises(TreeError, match=words):
        unpack(path, tmp_path / "out" / "x")
    assert not list((tmp_path / "out").iterdir())


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("sub")
        link.type, link.linkname = tarfile.SYMTYPE, str(victim)
        tar.addfile(link)
        file = tarfile.TarInfo("sub/evil")
        file.size = 1
        tar.addfile(file, io.BytesIO(b"x"))
    with contextlib.suppress(OSError):
        unpack(path, tmp_path / "out" / "x")
    assert not list(victim.iterdir())


def test_unused_directories_are_evicted_and_those_of_workers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [archive(tmp_path, data=letter * 2000) for letter in "abc"]
    control = Control(*contents)

    async def story() -> None:
        _, workdirs, used = made(tmp_path, control, cache_bytes=10_000_000)
        first = await workdirs.prepare("1", digest(contents[0]))
        second = await workdirs.prepare("2", digest(contents[1]))
        used.add("2")
        long_ago = time.time() - 2 * trees.UNUSED_S
        for path in (first, second, tmp_path / "state" / "trees" / f"{digest(contents[0])}.tar"):
            os.utime(path, (long_ago, long_ago))
        third = await workdirs.prepare("3", digest(contents[2]))
        assert not first.exists()
        assert not (tmp_path / "state" / "trees" / f"{digest(contents[0])}.tar").exists()
        assert second.is_dir(), "its job has a worker here"
        workdirs._cache_bytes = 15_000
        fourth = await workdirs.prepare("4", digest(contents[2]))
        assert not third.exists(), "the room is bounded"
        assert fourth.is_dir()
        assert second.is_dir()

    run(story())


def test_a_directory_whose_job_gets_a_worker_during_a_long_fetch_is_not_evicted(tmp_path: Path) -> None:
    contents = [archive(tmp_path, data=letter * 2000) for letter in "abc"]
    control = Control(*contents)

    async def story() -> None:
        _, workdirs, used = made(tmp_path, control, cache_bytes=0)
        first = await workdirs.prepare("1", digest(contents[0]))
        control.answers = False
        later = asyncio.create_task(workdirs.prepare("2", digest(contents[1])))
        while control.asked[-1].digest != digest(contents[1]):
            await asyncio.sleep(0)
        used.add("1")  # its worker is started while the other directory is on its way
        assert await workdirs.prepare("1", digest(contents[0])) == first
        control.answers = True
        control.answer(control.asked[-1])
        assert (await later).is_dir()
        assert first.is_dir()
        used.clear()
        await workdirs.prepare("3", digest(contents[2]))
        assert not first.exists()

    run(story())


def test_an_archive_that_is_being_unpacked_is_not_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [archive(tmp_path, data=letter * 2000) for letter in "ab"]
    control = Control(*contents)
    may_unpack = threading.Event()
    unpack_now = trees.unpack

    def slowly(path: Path, target: Path, owner: object = None) -> None:
        if target.parent.name == "1":
            assert may_unpack.wait(20)
        unpack_now(path, target)

    monkeypatch.setattr(trees, "unpack", slowly)

    async def story() -> None:
        fetcher, workdirs, _ = made(tmp_path, control, cache_bytes=0)
        first = asyncio.create_task(workdirs.prepare("1", digest(contents[0])))
        while not fetcher.path(digest(contents[0])).exists():
            await asyncio.sleep(0)
        await workdirs.prepare("2", digest(contents[1]))
        may_unpack.set()
        assert (await first).is_dir()

    run(story())


def test_nothing_is_remembered_of_directories_that_are_prepared(tmp_path: Path) -> None:
    content = archive(tmp_path, data="x")
    control = Control(content)

    async def story() -> None:
        _, workdirs, _ = made(tmp_path, control)
        for job in range(5):
            await workdirs.prepare(str(job), digest(content))
        assert not list(workdirs._preparing)

    run(story())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_job_under_an_account_of_its_own_gets_a_directory_that_it_owns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_JOBS_DIR", str(tmp_path / "jobs"))
    content = archive(tmp_path, data="x")
    control = Control(content)

    async def story() -> None:
        _, workdirs, _ = made(tmp_path, control)
        path = await workdirs.prepare("1", digest(content), NamedAccount("nobody"))
        (outside,) = (tmp_path / "jobs").iterdir()
        assert path == outside / "1" / digest(content), "the agent's own directory is closed to it"
        nobody = pwd.getpwnam("nobody").pw_uid
        assert {p.stat().st_uid for p in (path, path / "data")} == {nobody}
        assert [p.stat().st_uid for p in (outside, outside / "1")] == [0, 0]
        assert outside.stat().st_mode & 0o777 == 0o711

    run(story())


class Inner:
    """An executor that only notes what it is told."""

    name = "inner"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.exits: list[Exit] = []
        self.on_exit = self.exits.append

    def start(self, worker: WorkerSpec) -> None:
        self.told.append(("start", worker.worker, worker.workdir))

    def __getattr__(self, verb: str) -> Any:
        return lambda *a, **k: self.told.append((verb, *a))


def spec(worker: str, tree: str = "t") -> WorkerSpec:
    return WorkerSpec(worker, Path("/d"), "n", 0, ("x",), "/home/ada", {}, tree=tree)


def test_a_worker_starts_when_its_directory_is_there_and_can_be_ended_before(tmp_path: Path) -> None:
    async def story() -> None:
        inner, ready = Inner(), asyncio.Event()

        async def prepare(job: str, tree: str, account: RunAs) -> Path:
            if tree == "bad":
                raise TreeError("no room")
            await ready.wait()
            return tmp_path / job

        executor = PreparingExecutor(inner, prepare)  # type: ignore[arg-type]
        executor.start(spec("1.0", ""))
        for worker in ("2.0", "2.1", "2.2"):
            executor.start(spec(worker))
        executor.start(spec("3.0", "bad"))
        executor.suspend("2.1")
        executor.stop("2.2")
        while len(inner.exits) < 2:
            await asyncio.sleep(0)
        ready.set()
        while len(inner.told) < 4:
            await asyncio.sleep(0)
        assert inner.told == [
            ("start", "1.0", "/home/ada"),
            ("start", "2.0", str(tmp_path / "2")),
            ("start", "2.1", str(tmp_path / "2")),
            ("suspend", "2.1"),
        ]
        ended = {e.worker: e for e in inner.exits}
        assert ended["2.2"].asked_to_end
        assert not ended["2.2"].began
        assert ended["3.0"].why == "its working directory is not available: no room"
        executor.stop("2.0")
        assert inner.told[-1] == ("stop", "2.0")

    run(story())


def test_the_job_of_a_worker() -> None:
    assert [job_of(w) for w in ("17.3", "8")] == ["17", "8"]
