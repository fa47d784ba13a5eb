"""A job ends with everything that it started, whatever it does to its keeper and to its keeper's files.

Each story runs with a control group per worker (where this account may make one) and without.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shoal.executors import guard, keeper
from shoal.executors.base import Exit, WorkerSpec
from shoal.executors.cgroups import Cgroups
from shoal.executors.keeper_files import is_kept
from shoal.executors.local import LocalExecutor
from shoal.executors.orphans import new_mark
from shoal.executors.secret_files import SecretFiles


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cgroup v2, which this fixture mounts if none is mounted and this account may do so."""
    if Cgroups.find() is not None or os.geteuid() != 0:
        yield
        return
    place = tmp_path_factory.mktemp("cgroup")
    done = subprocess.run(["mount", "-t", "cgroup2", "none", place], capture_output=True)
    yield
    if done.returncode == 0:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(params=["cgroup", "process tree"])
def groups(mounted: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cgroups | None:
    found = Cgroups.find()
    monkeypatch.setattr(Cgroups, "find", staticmethod(lambda: None))
    if request.param == "cgroup" and found is None:
        pytest.skip("this account may not make control groups (cgroup v2)")
    return found if request.param == "cgroup" else None


def lives(pid: int) -> bool:
    return keeper.start_time(pid) is not None


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.02)


def run_story(groups: Cgroups | None, directory: Path, script: str, *, stop: bool) -> tuple[Exit, list[int]]:
    """Run a shell script that prints pids to the file `pids`. Return how its worker ended, and the pids."""
    pids = directory / "pids"

    async def story() -> Exit:
        executor = LocalExecutor(1, cgroups=groups)
        exits: list[Exit] = []
        executor.on_exit = exits.append
        command = ("bash", "-c", script.replace("PIDS", str(pids)))
        executor.start(
            WorkerSpec("1.0", directory / "w", "local", 0, command, str(directory), {}, grace_s=0.5)
        )
        await until(lambda: exits or (pids.exists() and "ready" in pids.read_text()))
        if stop:
            executor.stop("1.0")
        await until(lambda: exits)
        executor.close()
        return exits[0]

    ended = asyncio.run(story())
    return ended, [int(word) for word in pids.read_text().split() if word.isdigit()]


def test_a_stopped_keeper_does_not_save_its_worker(groups: Cgroups | None, tmp_path: Path) -> None:
    script = (
        "echo $$ >> PIDS; trap '' TERM; echo ready >> PIDS; while true; do kill -STOP $PPID; sleep 0.1; done"
    )
    ended, pids = run_story(groups, tmp_path, script, stop=True)
    assert not any(map(lives, pids))
    assert ended.code != 0


def test_helpers_with_a_cleared_environment_end_with_a_killed_keeper(
    groups: Cgroups | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The helper lives for two whole looks of the guard before the keeper is killed.
    monkeypatch.setattr("shoal.executors.local.INTERVAL_S", 0.05)
    look, seen, helper = guard.Guarded.look, tmp_path / "seen", tmp_path / "helper"
    looks = []

    def counted(self: guard.Guarded, children: keeper.Children) -> None:
        look(self, children)
        looks.append(helper.exists())
        if sum(looks) == 3:
            seen.touch()

    monkeypatch.setattr(guard.Guarded, "look", counted)
    script = (
        f"env -i setsid sleep 1000 & echo $! >> PIDS; echo $$ >> PIDS; touch {helper}; "
        f"until [ -e {seen} ]; do sleep 0.05; done; echo ready >> PIDS; kill -KILL $PPID; sleep 1000"
    )
    ended, pids = run_story(groups, tmp_path, script, stop=False)
    assert len(pids) == 2
    assert not any(map(lives, pids))
    assert ended.why == "its keeper was killed"


def test_the_guard_remembers_the_processes_of_a_keeper_that_has_just_died(tmp_path: Path) -> None:
    with subprocess.Popen(["bash", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        guarded = guard.Guarded(tmp_path, parent.pid, os.pidfd_open(parent.pid), 0.0, None)
        guarded.look()
        parent.kill()
        parent.wait()
        guarded.look()  # before the end of the keeper is noticed
        guarded.clean_up()
    os.close(guarded.pidfd)
    while lives(helper):
        time.sleep(0.01)


@pytest.mark.parametrize("groups", ["cgroup"], indirect=True)
def test_helpers_that_leave_the_control_group_end_with_a_killed_keeper(
    groups: Cgroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.executors.local.INTERVAL_S", 0.05)
    outside = groups.of(tmp_path / "w") or groups.make(tmp_path / "w")
    script = (
        f"echo 0 > {outside.parent}/cgroup.procs && echo left >> PIDS; env -i setsid sleep 1000 & "
        "echo $! >> PIDS; echo $$ >> PIDS; sleep 1; echo ready >> PIDS; kill -KILL $PPID; sleep 1000"
    )
    _, pids = run_story(groups, tmp_path, script, stop=False)
    assert "left" in (tmp_path / "pids").read_text()
    assert len(pids) == 2
    assert not any(map(lives, pids))


@pytest.mark.parametrize("forged", ["{}", '{"code": "x"}', '{"code": 0, "signal": null}', "[", ""])
def test_a_forged_exit_file_is_not_believed(groups: Cgroups | None, tmp_path: Path, forged: str) -> None:
    until_started = f"while [ ! -e {tmp_path}/w/started ]; do sleep 0.01; done"
    forge = f"echo '{forged}' > {tmp_path}/w/exit"
    script = f"{until_started}; echo ready $$ >> PIDS; {forge}; kill -KILL $PPID; sleep 1000"
    ended, _ = run_story(groups, tmp_path, script, stop=False)
    assert (ended.code, ended.why) == (None, "its keeper was killed")


def start_for_the_next_server(directory: Path, groups: Cgroups | None, script: str) -> int:
    """Start a worker under a server that then ends, and wait until it prints that it is ready. Return its pid."""
    pids = directory / "pids"

    async def first_server() -> None:
        executor = LocalExecutor(1, cgroups=groups)
        command = ("bash", "-c", f"{script}; echo $$ ready > {pids}; exec env -i sleep 1000")
        executor.start(
            WorkerSpec("1.0", directory / "w", "local", 0, command, str(directory), {}, grace_s=0.5)
        )
        await until(lambda: pids.exists() and "ready" in pids.read_text())
        executor.close()

    asyncio.run(first_server())
    return int(pids.read_text().split()[0])


async def adopted(
    directory: Path, groups: Cgroups | None, then: Callable[[LocalExecutor], object]
) -> list[Exit]:
    executor = LocalExecutor(1, cgroups=groups)
    exits: list[Exit] = []
    executor.on_exit = exits.append
    executor.adopt("1.0", directory / "w")
    then(executor)
    await until(lambda: exits)
    executor.close()
    return exits


@pytest.mark.parametrize(
    "changed", ["rm -f started", "echo 7 > started; echo 7 > mark", "rm -f started mark"]
)
def test_a_worker_that_changes_its_keepers_files_is_stopped_by_the_next_server(
    groups: Cgroups | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr("shoal.executors.local.STARTED_TIMEOUT_S", 0.1)
    until_started = "while [ ! -e w/started ]; do sleep 0.01; done"
    worker = start_for_the_next_server(tmp_path, groups, f"{until_started}; (cd w; {changed})")
    assert lives(worker)
    (ended,) = asyncio.run(adopted(tmp_path, groups, lambda executor: executor.stop("1.0")))
    assert ended.asked_to_end
    assert not lives(worker)
    assert not is_kept(tmp_path / "w")


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_a_job_lays_where_the_executor_will_write_is_removed(tmp_path: Path, what: str) -> None:
    """It may know the name of its next worker."""
    other, secrets = tmp_path / "other", SecretFiles(tmp_path)
    other.mkdir()
    (other / "file").write_text("of another")
    if what == "link":
        (tmp_path / "mark").symlink_to(other / "file")
        (tmp_path / "secrets").symlink_to(other)
        with pytest.raises(FileExistsError):
            secrets.write({"KEY": "x"})
    else:
        os.mkfifo(tmp_path / "mark")  # to open it would wait for a reader
        (tmp_path / "secrets").mkdir()
        os.mkfifo(tmp_path / "secrets" / "key")
        secrets.write({"KEY": "x"})
        assert (tmp_path / "secrets" / "key").read_text() == "x"
    mark = new_mark(tmp_path)
    assert (tmp_path / "mark").read_text() == mark
    assert [path.read_text() for path in other.iterdir()] == ["of another"]


@pytest.mark.parametrize(
    "forged", [{"code": 10**30}, {"code": 2**63}, {"code": -1}, {"steady_s": -1e300}, {"why": "x" * 100_000}]
)
def test_the_next_server_believes_no_number_that_a_keeper_cannot_have_written(
    tmp_path: Path, forged: dict[str, object]
) -> None:
    usual = {
        "code": 0, "signal": None, "why": "", "told": False, "steady_s": 1.0, "boot": keeper.boot_id(),
    }  # fmt: skip
    (tmp_path / "w").mkdir()
    for content, believed in ((usual, True), (usual | forged, False)):
        (tmp_path / "w" / "exit").write_text(json.dumps(content))
        (ended,) = asyncio.run(adopted(tmp_path, None, lambda executor: None))
        assert (ended.code == 0) is believed


def test_a_warm_start_that_is_answered_too_late_does_not_start_a_second_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    script.write_text(f"import os\nwith open({str(runs)!r}, 'a') as file: print(os.getpid(), file=file)\n")

    def too_late(answer: bytes) -> None:
        raise TimeoutError

    async def story() -> None:
        executor = LocalExecutor(1)
        executor.warm_up()
        zygote = executor._zygote
        assert zygote is not None
        await until(lambda: zygote.ready)
        spare = keeper.descendants(zygote._process.pid)
        # The keeper has its worker by now.
        monkeypatch.setattr("shoal.executors.zygote.json", SimpleNamespace(loads=too_late))
        exits: list[Exit] = []
        executor.on_exit = exits.append
        command = (sys.executable, str(script))
        executor.start(WorkerSpec("1.0", tmp_path / "w", "local", 0, command, str(tmp_path), {}, warm=True))
        await until(lambda: exits and not any(map(lives, spare)))
        executor.close()

    asyncio.run(story())
    assert len(runs.read_text().split()) == 1


def test_a_group_that_a_server_of_another_login_made_is_found(mounted: None, tmp_path: Path) -> None:
    found = Cgroups.find()
    if found is None:
        pytest.skip("this account may not make control groups (cgroup v2)")
    other = found.make(tmp_path / "login")
    earlier = Cgroups(other, other)
    group = earlier.make(tmp_path / "w")
    try:
        assert found.of(tmp_path / "w") == group
        assert found.of(tmp_path / "never started") is None
    finally:
        group.rmdir()
        other.rmdir()


def test_what_a_warm_worker_forked_ends_with_its_keeper_also_if_no_server_saw_it(tmp_path: Path) -> None:
    """The keeper is killed, and the next server learns of it only from the worker's directory."""
    script, pids = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(
        "import os, signal, time\n"
        "helper = os.fork()\n"
        "if helper == 0:\n    os.setsid(); time.sleep(1000)\n"
        f"while not os.path.exists({str(tmp_path / 'w' / 'started')!r}): time.sleep(0.01)\n"
        f"with open({str(pids)!r}, 'w') as file: print(helper, os.getpid(), 'ready', file=file)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)\n"
    )

    async def first_server() -> None:
        executor = LocalExecutor(1)
        executor._cgroups = None
        executor.warm_up()
        assert executor._zygote is not None
        command = (sys.executable, str(script))
        executor.start(WorkerSpec("1.0", tmp_path / "w", "local", 0, command, str(tmp_path), {}, warm=True))
        executor._keep = lambda *parts: None  # type: ignore[method-assign] # it is killed before it sees the end
        await until(lambda: pids.exists() and "ready" in pids.read_text())
        executor.close()

    async def next_server() -> Exit:
        executor = LocalExecutor(1)
        executor._cgroups = None
        exits: list[Exit] = []
        executor.on_exit = exits.append
        executor.adopt("1.0", tmp_path / "w")
        await until(lambda: exits)
        executor.close()
        return exits[0]

    asyncio.run(first_server())
    ended = asyncio.run(next_server())
    helper, worker, _ = pids.read_text().split()
    assert ended.why == "its keeper was killed"
    assert not lives(int(worker))
    assert not lives(int(helper))


def test_a_warm_parent_that_was_killed_or_stopped_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeZygote] = []

    class FakeZygote:
        warming = False

        def __init__(self) -> None:
            self.has_ended = False
            made.append(self)

        def start(self, directory: str, spec_fd: int, lock_fd: int) -> None:
            return None  # it does not answer: the worker starts cold

        def close(self) -> None:
            self.has_ended = True

    monkeypatch.setattr("shoal.executors.local.Zygote", FakeZygote)

    async def story() -> None:
        executor = LocalExecutor(1)
        exits: list[Exit] = []
        executor.on_exit = exits.append
        executor.warm_up()
        made[0].close()
        for number in range(2):
            directory = tmp_path / str(number)
            spec = WorkerSpec(f"1.{number}", directory, "local", 0, ("true",), "/", {}, warm=True)
            executor.start(spec)
        await until(lambda: len(exits) == 2)
        executor.close()

    asyncio.run(story())
    assert len(made) == 2


def test_a_keeper_that_cannot_be_watched_does_not_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many_files(pidfd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("shoal.executors.local.pid_of", too_many_files)

    async def story() -> Exit:
        executor = LocalExecutor(1)
        exits: list[Exit] = []
        executor.on_exit = exits.append
        executor.start(WorkerSpec("1.0", tmp_path / "w", "local", 0, ("sleep", "1000"), "/", {}))
        await until(lambda: exits and not is_kept(tmp_path / "w"))
        executor.close()
        return exits[0]

    ended = asyncio.run(story())
    assert (ended.began, ended.why) == (False, "cannot start it: Too many open files")


def test_a_process_tree_is_frozen_before_it_is_killed(tmp_path: Path) -> None:
    """A process that forks all the time leaves nothing behind."""
    source = "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(0.05); os._exit(0)\n    time.sleep(0.01)"
    forker = subprocess.Popen([sys.executable, "-c", source])
    try:
        found = guard._freeze(os.getpid())
        assert forker.pid in found
    finally:
        keeper.send_signal(keeper.descendants(), 9)
        forker.wait()


def test_a_python_of_another_name_in_the_same_place_starts_warm(tmp_path: Path) -> None:
    from shoal.executors.zygote import may_start_warm

    here = os.path.dirname(os.path.abspath(sys.executable))
    for name in ("python", "python3", sys.executable):
        assert may_start_warm((name, "train.py"), {"PATH": here}), name
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert not may_start_warm((str(link), "train.py"), {"PATH": here})


def test_a_worker_that_was_killed_while_it_waited_for_a_job_starts_cold(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")

    async def story() -> Exit:
        executor = LocalExecutor(1)
        executor.warm_up()
        zygote = executor._zygote
        assert zygote is not None
        await until(lambda: zygote.ready)
        (spare,) = psutil.Process(zygote._process.pid).children()
        await until(spare.children)
        (waiting,) = spare.children()
        waiting.kill()
        await until(lambda: not lives(waiting.pid))
        exits: list[Exit] = []
        executor.on_exit = exits.append
        command = (sys.executable, str(script))
        executor.start(WorkerSpec("1.0", tmp_path / "w", "local", 0, command, str(tmp_path), {}, warm=True))
        await until(lambda: exits)
        executor.close()
        return exits[0]

    assert asyncio.run(story()).ok
