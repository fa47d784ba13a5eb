"""Workers as processes of this machine, each under a keeper (`keeper.py`) that outlives the control plane.

The executor signals a process only through a pidfd of its keeper, after it has checked pid and start time. So it never
hits another process that has got the same pid. If a keeper itself is killed, `orphans` ends the processes it kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.executors import keeper
from shoal.executors.base import Exit, GpuUsage, NodeInfo, WorkerSpec
from shoal.executors.gpus import UsageMeter, find_gpus, type_word
from shoal.executors.logs import Line, read_lines, tail_position
from shoal.executors.orphans import MARK, kill_orphans, new_mark
from shoal.executors.zygote import Zygote, may_start_warm

LOG_FILE_BYTES, LOG_FILES = 8 * 1024 * 1024, 4
VIRTUAL_TYPE = "virtual"
ZYGOTE_TIMEOUT_S = 30.0
"""How long a worker waits for the zygote's imports before it starts cold."""
#: Variables of the control plane's own environment that a worker gets. All others come from the job.
PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME",
)  # fmt: skip


@dataclass(slots=True)
class _Kept:
    """One worker under its keeper."""

    directory: Path
    pidfd: int
    child: subprocess.Popen[bytes] | None  # the keeper, if this process started it


class LocalExecutor:
    """Runs workers on the GPUs that NVML finds, or on `virtual_gpus`: then workers run on the CPU.

    All calls must be made on the thread of a running event loop. `zygote` may be shared with other executors. With
    `lease_file`, keepers kill their workers when the time in that file has passed (see `keeper.py`).
    """

    name = "local"

    def __init__(
        self,
        virtual_gpus: int | None = None,
        *,
        zygote: Zygote | None = None,
        log_file_bytes: int = LOG_FILE_BYTES,
        log_files: int = LOG_FILES,
        lease_file: Path | None = None,
    ) -> None:
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self._nodes, self.why_virtual = _find_nodes(virtual_gpus)
        self._log_file_bytes, self._log_files = log_file_bytes, log_files
        self._lease_file = lease_file
        self._zygote, self._owns_zygote = zygote, False
        self._usage_meter = UsageMeter()
        self._kept: dict[str, _Kept] = {}
        #: Workers that wait for the zygote.
        self._delayed: dict[str, asyncio.Task[None]] = {}
        #: Workers that are being adopted, with the signals to send them afterwards.
        self._adopting: dict[str, list[signal.Signals]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self._nodes

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        return {
            (node.name, index): found
            for node in self._nodes
            if not node.virtual
            for index, uuid in enumerate(node.devices)
            if (found := self._usage_meter.read(uuid)) is not None
        }

    def logs(self, directory: Path, begin: int, max_bytes: int = 256 * 1024) -> list[Line]:
        return read_lines(directory, begin, max_bytes)

    def tail_position(self, directory: Path, lines: int) -> int:
        return tail_position(directory, lines)

    def warm_up(self) -> None:
        if self._zygote is None:
            self._zygote, self._owns_zygote = Zygote(), True

    def close(self) -> None:
        if self._zygote is not None and self._owns_zygote:
            self._zygote.close()
        self._zygote = None

    # Starting

    def start(self, worker: WorkerSpec) -> None:
        if worker.warm and self._zygote is not None and self._zygote.warming:
            # Its imports end soon, and sooner than all the workers of a job could do their own.
            task = asyncio.get_running_loop().create_task(self._start_when_warm(worker, self._zygote))
            self._delayed[worker.worker] = task
            return
        self._start_now(worker)

    async def _start_when_warm(self, worker: WorkerSpec, zygote: Zygote) -> None:
        deadline_s = time.monotonic() + ZYGOTE_TIMEOUT_S
        while zygote.warming and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        if self._delayed.pop(worker.worker, None) is not None:
            self._start_now(worker)

    def _start_now(self, worker: WorkerSpec) -> None:
        try:
            worker.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(worker.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._start_keeper(worker, lock)
            finally:
                os.close(lock)
        except OSError as error:
            why = f"cannot start it: {error.strerror or error}"
            self._emit_soon(Exit(worker.worker, None, None, why, began=False))

    def _start_keeper(self, worker: WorkerSpec, lock: int) -> None:
        env = self._env(worker) | {MARK: new_mark(worker.directory)}
        spec = {
            "command": list(worker.command),
            "workdir": worker.workdir,
            "env": env,
            "grace_s": worker.grace_s,
            "log_file_bytes": self._log_file_bytes,
            "log_files": self._log_files,
            "lease_file": None if self._lease_file is None else str(self._lease_file),
        }
        # The specification is passed in memory: neither as an argument, which `ps` shows, nor on disk.
        spec_fd = os.memfd_create("worker", os.MFD_CLOEXEC)
        try:
            os.write(spec_fd, json.dumps(spec).encode())
            os.lseek(spec_fd, 0, os.SEEK_SET)
            child, pid = None, self._start_warm(worker, env, spec_fd, lock)
            if pid is None:
                os.lseek(spec_fd, 0, os.SEEK_SET)
                child = _start_cold(worker.directory, spec_fd, lock)
                pid = child.pid
        finally:
            os.close(spec_fd)
        self._keep(worker.worker, worker.directory, os.pidfd_open(pid), child)

    def _start_warm(self, worker: WorkerSpec, env: dict[str, str], spec_fd: int, lock: int) -> int | None:
        if self._zygote is None or not worker.warm or not may_start_warm(worker.command, env):
            return None
        return self._zygote.start(str(worker.directory), spec_fd, lock)

    def _env(self, worker: WorkerSpec) -> dict[str, str]:
        node = next(n for n in self._nodes if n.name == worker.node)
        env = {k: os.environ[k] for k in PASSED_ON if k in os.environ} | {"PYTHONUNBUFFERED": "1"}
        if node.virtual:
            threads = max((os.cpu_count() or 1) // node.gpus, 1)
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "SHOAL_DEVICE": "cpu"}
        else:
            env |= {"CUDA_VISIBLE_DEVICES": node.devices[worker.gpu], "SHOAL_DEVICE": "cuda:0"}
        return env | worker.env

    # Stopping and suspending

    def stop(self, worker: str, *, kill: bool = False) -> None:
        if self._delayed.pop(worker, None) is not None:
            why = "it was ended before it began"
            self._emit_soon(Exit(worker, None, None, why, began=False, asked_to_end=True))
            return
        self._signal(worker, signal.SIGQUIT if kill else signal.SIGTERM)

    def suspend(self, worker: str) -> None:
        self._signal(worker, signal.SIGUSR1)

    def wake(self, worker: str) -> None:
        self._signal(worker, signal.SIGUSR2)

    def _signal(self, worker: str, number: signal.Signals) -> None:
        kept = self._kept.get(worker)
        if kept is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(kept.pidfd, number)
        elif worker in self._adopting:
            self._adopting[worker].append(number)

    # Watching keepers

    def _keep(self, worker: str, directory: Path, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self._kept[worker] = _Kept(directory, pidfd, child)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, worker)

    def _ended(self, worker: str) -> None:
        kept = self._kept.pop(worker)
        asyncio.get_running_loop().remove_reader(kept.pidfd)
        os.close(kept.pidfd)
        if kept.child is not None:
            kept.child.wait()
        self._emit(self._exit_of(worker, kept.directory))

    def _exit_of(self, worker: str, directory: Path) -> Exit:
        found = read_json(directory / "exit")
        if found is not None:
            same_boot = found["boot"] and found["boot"] == keeper.boot_id()
            ago_s = max(time.monotonic() - found["steady_s"], 0.0) if same_boot else None
            return Exit(
                worker, found["code"], found["signal"], found["why"], asked_to_end=found["told"], ago_s=ago_s
            )
        kill_orphans(directory)
        began = (directory / "started").exists()
        why = "its keeper was killed" if began else "it was ended before it began"
        return Exit(worker, None, None, why, began=began)

    def _emit(self, exit_: Exit) -> None:
        self.on_exit(exit_)

    def _emit_soon(self, exit_: Exit) -> None:
        asyncio.get_running_loop().call_soon(self._emit, exit_)

    def adopt(self, worker: str, directory: Path) -> None:
        self._adopting[worker] = []
        task = asyncio.get_running_loop().create_task(self._adopt(worker, directory))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopt(self, worker: str, directory: Path) -> None:
        # A keeper that holds its lock but has not written `started` yet was started this moment.
        while is_kept(directory) and not (directory / "started").exists():
            await asyncio.sleep(0.02)
        started = read_json(directory / "started")
        pidfd = _open_keeper(started) if started is not None and is_kept(directory) else None
        signals = self._adopting.pop(worker)
        if pidfd is None:
            self._emit(self._exit_of(worker, directory))
            return
        self._keep(worker, directory, pidfd, None)
        for number in signals:
            self._signal(worker, number)


def _find_nodes(virtual_gpus: int | None) -> tuple[tuple[NodeInfo, ...], str]:
    """The nodes of this machine, and why they are virtual if nobody asked for that."""
    why = ""
    if virtual_gpus is None:
        gpus, why = find_gpus()
        if gpus:
            # A node has one GPU type. A machine with several types becomes several nodes.
            words = dict.fromkeys(type_word(g.name) for g in gpus)
            by_type = {word: [g for g in gpus if type_word(g.name) == word] for word in words}
            return tuple(
                NodeInfo(
                    "local" if len(by_type) == 1 else f"local-{word}",
                    len(found),
                    word,
                    False,
                    tuple(g.uuid for g in found),
                    gpu_memory_mb=min(g.memory_bytes for g in found) / 2**20,
                )
                for word, found in by_type.items()
            ), ""
        virtual_gpus = os.cpu_count() or 1
    devices = tuple(f"virtual {i}" for i in range(virtual_gpus))
    return (NodeInfo("local", virtual_gpus, VIRTUAL_TYPE, True, devices),), why


def _start_cold(directory: Path, spec_fd: int, lock: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(directory), str(lock)],
        stdin=spec_fd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),  # held for as long as the keeper lives
        start_new_session=True,
        cwd="/",
        env={},
    )


def _open_keeper(started: dict[str, Any]) -> int | None:
    """A pidfd of the keeper that wrote `started`, if it still runs."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(started["keeper_pid"])
        if keeper.start_time(started["keeper_pid"]) == started["keeper_start_time"]:
            return pidfd
        os.close(pidfd)
    return None


def is_kept(directory: Path) -> bool:
    """Whether the keeper of the worker in this directory lives."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file that a keeper writes. Return None if it is not there."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
