"""Workers as processes: started, stopped, suspended, taken over, their output kept, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shoal.executors import keeper
from shoal.executors.base import Exit, WorkerSpec
from shoal.executors.keeper import start_time
from shoal.executors.keeper_files import is_kept
from shoal.executors.local import LocalExecutor
from shoal.executors.logs import end_position, read_lines, segments, tail_position
from shoal.executors.pace import Pace
from shoal.executors.zygote import Zygote, may_start_warm


class Place:
    """An executor and what it has told so far."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.executor = LocalExecutor(2, **options)
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.executor.on_exit = self.exits.put_nowait
        self.count = 0

    def start(self, *command: str, **options: Any) -> str:
        worker = f"1.{self.count}"
        self.count += 1
        spec: dict[str, Any] = {"workdir": "/tmp", "env": {}, "grace_s": 5.0, **options}
        self.executor.start(
            WorkerSpec(worker=worker, directory=self.at(worker), node="local", gpu=0, command=command, **spec)
        )
        return worker

    def at(self, worker: str) -> Path:
        return self.directory / worker

    async def exit(self) -> Exit:
        return await asyncio.wait_for(self.exits.get(), 30)

    async def started(self, worker: str) -> dict[str, Any]:
        return await self.until(lambda: json.loads((self.at(worker) / "started").read_text()))

    async def until(self, what: Callable[[], Any]) -> Any:
        for _ in range(3000):
            try:
                if found := what():
                    return found
            except (OSError, ValueError):
                pass
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come to pass")

    def text(self, worker: str) -> list[str]:
        return [line.text for line in read_lines(self.at(worker), 0)]


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story(), 60)

    asyncio.run(limited())


def state_of(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat[stat.rindex(")") + 2]


@pytest.mark.parametrize(
    ("command", "code", "name"),
    [
        (("true",), 0, None),
        (("sh", "-c", "exit 7"), 7, None),
        (("sh", "-c", "kill -SEGV $$"), None, "SIGSEGV"),
        (("no-such-program",), 127, None),
        (("/tmp",), 126, None),
    ],
)
def test_exit_codes_and_signals_are_recorded(
    tmp_path: Path, command: tuple[str, ...], code: int | None, name: str | None
) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        place.start(*command)
        exit_ = await place.exit()
        assert (exit_.code, exit_.signal, exit_.asked_to_end) == (code, name, False)
        if code in (126, 127):
            assert command[0] in exit_.why

    run(story)


def test_a_working_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        worker = place.start("true", workdir=str(tmp_path / "gone"))
        exit_ = await place.exit()
        assert exit_.code == 127
        assert "gone" in exit_.why
        assert "gone" in place.text(worker)[0]

    run(story)


def test_the_environment_is_what_was_given_and_is_not_seen_in_ps_or_on_disk(tmp_path: Path) -> None:
    async def story() -> None:
        os.environ["SHOAL_TEST_LEAK"] = "leak"
        place = Place(tmp_path)
        worker = place.start(
            *("sh", "-c", "env; exec sleep 100"),
            env={"KEY": "hunter2", "RANK": "3"},
            secret_files={"SHOAL_SECRET_FILE": "swordfish"},
        )
        await place.until(lambda: any("RANK=3" in t for t in place.text(worker)))
        env = dict(line.partition("=")[::2] for line in place.text(worker))
        assert env["KEY"] == "hunter2"
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        assert "SHOAL_TEST_LEAK" not in env
        processes = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
        assert "hunter2" not in processes
        assert "swordfish" not in processes
        secret = Path(env["SHOAL_SECRET_FILE"])
        assert secret.read_text() == "swordfish"
        assert (secret.stat().st_mode & 0o777, secret.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        for file in place.at(worker).rglob("*"):
            if file.is_file() and file != secret and not file.name.startswith("log."):
                assert not re.search(b"hunter2|swordfish", file.read_bytes()), file
        del os.environ["SHOAL_TEST_LEAK"]
        place.executor.stop(worker, kill=True)
        await place.exit()
        await place.until(lambda: not secret.exists())

    run(story)


def test_no_part_of_a_worker_survives_a_stop_even_one_that_hides(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        # A child in a session of its own, whose parent has ended, and which ignores SIGTERM.
        hides = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; echo $$; sleep 1000' &) ; sleep 1000"
        worker = place.start("sh", "-c", hides, grace_s=0.3)
        hidden = int((await place.until(lambda: place.text(worker)))[0])
        assert start_time(hidden) is not None
        place.executor.stop(worker)
        exit_ = await place.exit()
        assert (exit_.signal, exit_.asked_to_end) == ("SIGKILL", True)
        assert start_time(hidden) is None

    run(story)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        worker = place.start("sh", "-c", "sleep 1000 & echo $!")
        assert (await place.exit()).code == 0
        assert start_time(int(place.text(worker)[0])) is None

    run(story)


def test_a_worker_may_use_its_grace_to_save(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        worker = place.start(
            "sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done"
        )
        await place.until(lambda: place.text(worker) == ["up"])
        place.executor.stop(worker)
        exit_ = await place.exit()
        assert (exit_.code, exit_.asked_to_end) == (0, True)
        assert place.text(worker) == ["up", "saved"]

    run(story)


def test_suspended_processes_stand_still_and_can_still_be_stopped(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        worker = place.start("sh", "-c", "sleep 1000 & echo $!; wait")
        child = int((await place.until(lambda: place.text(worker)))[0])
        parent = (await place.started(worker))["pid"]
        place.executor.suspend(worker)
        await place.until(lambda: state_of(child) == state_of(parent) == "T")
        place.executor.wake(worker)
        await place.until(lambda: state_of(child) != "T" and state_of(parent) != "T")
        place.executor.suspend(worker)
        await place.until(lambda: state_of(child) == "T")
        place.executor.stop(worker)
        assert (await place.exit()).asked_to_end
        assert start_time(child) is None

    run(story)


@pytest.mark.parametrize("name", sorted(keeper.WARNINGS))
def test_a_warning_reaches_the_command_and_ends_nothing(tmp_path: Path, name: str) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        script = f"trap 'echo warned; exit 7' {name}; echo ready; while :; do sleep 0.05; done"
        worker = place.start("bash", "-c", script)
        await place.until(lambda: place.text(worker) == ["ready"])
        place.executor.warn(worker, "none-such")
        place.executor.warn(worker, name)
        exit_ = await place.exit()
        assert (exit_.code, exit_.asked_to_end, place.text(worker)) == (7, False, ["ready", "warned"])

    run(story)


def test_a_worker_that_waits_for_its_start_does_then_what_it_was_told(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path, pace=Pace(most=1))
        first = place.start("sleep", "100")
        second = place.start("sh", "-c", "while :; do :; done", waits_for_go=True)
        third = place.start("sleep", "100")
        place.executor.suspend(second)
        place.executor.go(second)
        place.executor.stop(third)
        assert (exit_ := await place.exit()).worker == third
        assert (exit_.began, exit_.asked_to_end) == (False, True)
        pid = (await place.started(second))["pid"]
        await place.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        assert (place.at(second) / "go").exists()
        for worker in (first, second):
            place.executor.stop(worker, kill=True)
        assert {(await place.exit()).worker, (await place.exit()).worker} == {first, second}
        assert not place.at(third).exists()

    asyncio.run(story())


@pytest.mark.parametrize(
    "when", ["it waits for its start", "its keeper starts", "it is taken over", "it runs"]
)
def test_of_suspend_and_wake_the_last_one_counts(tmp_path: Path, when: str) -> None:
    """Signals that wait for a keeper reach it in the order of their numbers."""

    async def story() -> None:
        place = Place(tmp_path, pace=Pace(most=1))
        first = place.start("sleep", "100") if when == "it waits for its start" else None
        worker = place.start("sh", "-c", "while :; do :; done")
        assert (worker in place.executor._delayed) == (when == "it waits for its start")
        if when in ("it is taken over", "it runs"):
            await place.started(worker)
        told = place
        if when == "it is taken over":
            told = Place(tmp_path)
            told.executor.adopt(worker, place.at(worker))
            assert worker in told.executor._adopting
        keeper_pid = place.executor._kept[worker].pid if worker in place.executor._kept else None
        if when == "it runs":
            os.kill(keeper_pid, signal.SIGSTOP)  # so that all wait for it
        for tell in ("suspend", "wake", "suspend"):
            getattr(told.executor, tell)(worker)
        pid = (await place.started(worker))["pid"]
        await place.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        await place.until(lambda: told.executor._kept[worker].wanted is None)  # it was told once more
        await place.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        for _ in range(30):
            await asyncio.sleep(0.01)
            assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        for each in filter(None, (first, worker)):
            place.executor.stop(each, kill=True)
            await place.exit()

    run(story)


def test_one_worker_that_cannot_be_started_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> str:
        raise RuntimeError("a fault in the program")

    async def story() -> None:
        place = Place(tmp_path, pace=Pace(most=1))
        with monkeypatch.context() as patched:
            patched.setattr("shoal.executors.local.new_mark", broken)
            worker = place.start("true")
        other = place.start("true")
        exits = {exit_.worker: exit_ for exit_ in (await place.exit(), await place.exit())}
        assert (exits[worker].began, exits[worker].why) == (False, "cannot start it: a fault in the program")
        assert exits[other].code == 0

    run(story)


def test_workers_that_a_dead_zygote_does_not_start_begin_in_turn(tmp_path: Path) -> None:
    async def story() -> None:
        ended = SimpleNamespace(warming=True, has_ended=True, start=lambda *args: None)
        place = Place(tmp_path, pace=Pace(most=1), zygote=ended)
        script = tmp_path / "train.py"
        script.write_text("")
        workers = [place.start(sys.executable, str(script), warm=True) for _ in range(3)]
        assert len(place.executor._delayed) == 3, "they wait for its imports"
        most = 0
        ended.warming = False
        while len(place.executor._kept) + place.exits.qsize() < 3:
            most = max(most, len(place.executor._pace._starting))
            await asyncio.sleep(0)
        assert most == 1
        assert {(await place.exit()).worker for _ in workers} == set(workers)

    run(story)


def test_if_the_keeper_is_killed_the_worker_ends_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        bystander = subprocess.Popen(["sleep", "1000"])
        worker = place.start("sh", "-c", "(setsid sleep 1000 & echo $!); sleep 1000")
        hidden = int((await place.until(lambda: place.text(worker)))[0])
        os.kill((await place.started(worker))["keeper_pid"], signal.SIGKILL)
        exit_ = await place.exit()
        assert (exit_.code, exit_.signal) == (None, None)
        assert "keeper" in exit_.why
        await place.until(lambda: start_time(hidden) is None)
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()

    run(story)


def test_a_worker_is_taken_over_by_another_executor_with_its_exit_code(tmp_path: Path) -> None:
    async def story() -> None:
        go = tmp_path / "go"
        first = Place(tmp_path)
        worker = first.start("sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done; exit 5")
        pid = (await first.started(worker))["pid"]
        second = Place(tmp_path)
        second.executor.adopt(worker, second.at(worker))
        await asyncio.sleep(0.05)
        assert start_time(pid) is not None
        go.touch()
        assert (await second.exit()).code == 5
        third = Place(tmp_path)
        third.executor.adopt(worker, third.at(worker))
        assert (await third.exit()).code == 5, "also when it ended before anyone came"
        assert (await first.exit()).code == 5

    run(story)


def test_another_process_with_the_same_number_is_never_touched(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        bystander = subprocess.Popen(["sleep", "1000"])
        directory = place.at("1.9")
        directory.mkdir()
        (directory / "mark").write_text("0" * 32)
        started = {"pid": bystander.pid, "start_time": 1, "keeper_pid": bystander.pid, "keeper_start_time": 1}
        (directory / "started").write_text(json.dumps(started))
        place.executor.adopt("1.9", directory)
        assert (await place.exit()).code is None
        place.executor.stop("1.9", kill=True)
        await asyncio.sleep(0.05)
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()

    run(story)


def test_a_worker_that_was_never_started_is_said_to_have_never_begun(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        place.executor.adopt("1.7", place.at("1.7"))
        exit_ = await place.exit()
        assert not exit_.began
        assert not is_kept(place.at("1.7"))

    run(story)


def test_output_is_capped_and_rotated_and_positions_stay_true(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path, log_file_bytes=20_000, log_files=3)
        worker = place.start("sh", "-c", "i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done")
        await place.exit()
        parts = segments(place.at(worker))
        assert len(parts) <= 3
        assert sum(p.stat().st_size for _, p in parts) < 150_000
        dropped, *lines = read_lines(place.at(worker), 0, 10_000_000)
        assert "of earlier output were dropped" in dropped.text
        numbers = [int(line.text.split()[1]) for line in lines]
        assert numbers == list(range(numbers[0], 5000)), "the newest are kept, in order and whole"
        middle = lines[len(lines) // 2]
        assert read_lines(place.at(worker), middle.end)[0] == lines[len(lines) // 2 + 1]
        assert read_lines(place.at(worker), end_position(place.at(worker))) == []
        tail = read_lines(place.at(worker), tail_position(place.at(worker), 3))
        assert [line.text for line in tail] == ["line 4997", "line 4998", "line 4999"]

    run(story)


def test_odd_output_is_kept_readable(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        code = (
            "import os; os.write(1, b'10%\\r50%\\r100%\\n'); os.write(2, b'bad \\xff byte\\n');"
            "os.write(1, b'x' * 40000); os.write(1, b'\\nno newline at the end')"
        )
        worker = place.start(sys.executable, "-c", code)
        await place.exit()
        texts = place.text(worker)
        assert texts[0] == "100%"
        assert texts[1] == "bad \ufffd byte"
        assert "".join(texts[2:-1]) == "x" * 40000
        assert texts[-1] == "no newline at the end"

    run(story)


def test_when_the_disk_is_full_output_is_lost_but_the_job_is_not(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs root)")

    async def story() -> None:
        place = Place(mount)
        go = tmp_path / "go"
        script = f"seq 10000; while [ ! -e {go} ]; do sleep 0.02; done; echo after; exit 3"
        worker = place.start("sh", "-c", script)
        await place.until(lambda: os.statvfs(mount).f_bavail == 0)
        for part in segments(place.at(worker)):
            os.truncate(part[1], 0)  # the operator makes room
        go.touch()
        assert (await place.exit()).code == 3
        assert place.text(worker)[-1] == "after"
        assert any("were lost" in t for t in place.text(worker))

    try:
        run(story)
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)


def test_only_scripts_for_this_python_start_warm(tmp_path: Path) -> None:
    python = sys.executable
    other = tmp_path / "python"
    other.symlink_to("/bin/true")
    path = {"PATH": f"{os.path.dirname(python)}:/usr/bin"}
    assert may_start_warm((python, "train.py", "--lr", "1"), path)
    assert may_start_warm((os.path.basename(python), "train.py"), path)
    assert not may_start_warm((str(other), "train.py"), path)
    assert not may_start_warm((python, "-m", "train"), path)
    assert not may_start_warm((python, "train"), path)
    assert not may_start_warm(("sh", "train.py"), path)


def test_a_warm_worker_is_as_good_as_a_cold_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    async def story() -> None:
        place = Place(tmp_path)
        place.executor.warm_up()
        script = tmp_path / "train.py"
        script.write_text(
            "import os, sys, torch\n"
            "print(os.environ['KEY'], os.environ.get('SHOAL_CONTROL'), sys.argv[1:], os.getcwd(), __name__)\n"
            "print('err', file=sys.stderr)\n"
            "sys.exit(4) if len(sys.argv) > 1 else __import__('time').sleep(1000)\n"
        )
        worker = place.start(
            sys.executable, str(script), "x", env={"KEY": "v"}, warm=True, workdir=str(tmp_path)
        )
        assert (await place.exit()).code == 4
        assert place.text(worker) == [f"v None ['x'] {tmp_path} __main__", "err"]
        assert place.executor._zygote is not None
        assert place.executor._zygote.ready, "it was started by the warm process"
        # The warm process and the executor go; the worker stays, and is taken over.
        second = place.start(sys.executable, str(script), env={"KEY": "v"}, warm=True)
        pid = (await place.started(second))["pid"]
        place.executor.close()
        later = Place(tmp_path)
        later.executor.adopt(second, later.at(second))
        await asyncio.sleep(0.1)
        assert start_time(pid) is not None
        later.executor.stop(second)
        assert (await later.exit()).asked_to_end
        assert start_time(pid) is None

    run(story)


def test_a_zygote_that_ends_leaves_no_process_that_still_waits(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    zygote = Zygote()
    assert zygote.wait_ready()
    waiting = psutil.Process(zygote._process.pid).children(recursive=True)
    assert len(waiting) >= 1, "a keeper was forked ahead of time"
    zygote.close()
    _, alive = psutil.wait_procs(waiting, timeout=30)
    assert not alive
