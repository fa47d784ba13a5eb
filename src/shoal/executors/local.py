"""Workers as processes of this machine, each under a keeper (`shim`) that outlives the control plane.

A process is only ever signalled through a pidfd of its keeper, after pid and start time were checked: a number
that was given to another process meanwhile cannot be hit. If a keeper itself is killed, what it kept is found by
an unguessable mark in its environment and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.executors import shim
from shoal.executors.base import Exit, GpuUsage, NodeInfo, WorkerSpec
from shoal.executors.gpus import UsageMeter, find_gpus, type_word
from shoal.executors.warm import Warmer, may_be_warm

LOG_FILE_BYTES, LOG_FILES = 8 * 1024 * 1024, 4
VIRTUAL_TYPE = "virtual"
PATIENCE_S = 30.0
"""How long a worker waits for the warm process before it starts cold."""
MARK = "SHOAL_MARK"
#: What of the control plane's own environment a worker gets; all else is the job's to give.
PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME",
)  # fmt: skip


@dataclass(slots=True)
class _Kept:
    """One worker under its keeper."""

    directory: Path
    pidfd: int
    child: subprocess.Popen[bytes] | None


class LocalExecutor:
    """Real GPUs found with NVML, or `virtual_gpus` that are none: workers then run on the CPU."""

    name = "local"

    def __init__(
        self,
        virtual_gpus: int | None = None,
        *,
        log_file_bytes: int = LOG_FILE_BYTES,
        log_files: int = LOG_FILES,
    ) -> None:
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.why_virtual = ""
        self._log_file_bytes, self._log_files = log_file_bytes, log_files
        self._kept: dict[str, _Kept] = {}
        self._warmer: Warmer | None = None
        #: Signals for workers that are about to be taken over.
        self._owed: dict[str, list[signal.Signals]] = {}
        self._delayed: dict[str, asyncio.Task[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._nodes = self._find_nodes(virtual_gpus)
        self._meter = UsageMeter()

    def _find_nodes(self, virtual_gpus: int | None) -> tuple[NodeInfo, ...]:
        if virtual_gpus is None:
            gpus, why_none = find_gpus()
            if gpus:
                # A node has one type; another type in the same machine makes another node of it.
                types = dict.fromkeys(type_word(g.name) for g in gpus)
                return tuple(
                    NodeInfo(
                        "local" if len(types) == 1 else f"local-{word}",
                        sum(type_word(g.name) == word for g in gpus),
                        word,
                        False,
                        tuple(g.uuid for g in gpus if type_word(g.name) == word),
                        gpu_memory_mb=min(g.memory_bytes for g in gpus if type_word(g.name) == word) / 2**20,
                    )
                    for word in types
                )
            self.why_virtual = why_none
            virtual_gpus = os.cpu_count() or 1
        devices = tuple(f"virtual {i}" for i in range(virtual_gpus))
        return (NodeInfo("local", virtual_gpus, VIRTUAL_TYPE, True, devices),)

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self._nodes

    # Starting and stopping

    def start(self, worker: WorkerSpec) -> None:
        if worker.warm and self._warmer is not None and self._warmer.warming:
            # Its imports are done soon, and sooner than all the workers of a job could do their own.
            task = asyncio.get_running_loop().create_task(self._start_when_warm(worker, self._warmer))
            self._delayed[worker.worker] = task
            return
        self._start_now(worker)

    async def _start_when_warm(self, worker: WorkerSpec, warmer: Warmer) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while warmer.warming and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._delayed.pop(worker.worker, None) is not None:
            self._start_now(worker)

    def _start_now(self, worker: WorkerSpec) -> None:
        try:
            self._start(worker)
        except OSError as error:
            why = f"cannot start it: {error.strerror or error}"
            asyncio.get_running_loop().call_soon(
                self._tell, Exit(worker.worker, None, None, why, began=False)
            )

    def _start(self, worker: WorkerSpec) -> None:
        directory = worker.directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = secrets.token_hex(16)
        (directory / "mark").write_text(mark)
        spec = {
            "command": list(worker.command),
            "workdir": worker.workdir,
            "env": self._env(worker) | {MARK: mark},
            "grace_s": worker.grace_s,
            "log_file_bytes": self._log_file_bytes,
            "log_files": self._log_files,
        }
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # The specification travels in memory: neither in an argument, which `ps` shows, nor on disk.
        given = os.memfd_create("worker", os.MFD_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(given, json.dumps(spec).encode())
            os.lseek(given, 0, os.SEEK_SET)
            if self._start_warm(worker, spec["env"], given, lock):
                return
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", shim.__file__, str(directory), str(lock)],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),  # held for as long as the keeper lives, whoever else dies
                start_new_session=True,
                cwd="/",
                env={},
            )
        finally:
            os.close(given)
            os.close(lock)
        self._keep(worker.worker, directory, os.pidfd_open(child.pid), child)

    def warm_up(self) -> None:
        """Have a process ready that has done the imports of a training script."""
        if self._warmer is None:
            self._warmer = Warmer()

    def _start_warm(self, worker: WorkerSpec, env: dict[str, str], given: int, lock: int) -> bool:
        if self._warmer is None or not worker.warm or not may_be_warm(worker.command, env):
            return False
        pid = self._warmer.start(str(worker.directory), given, lock)
        if pid is None:
            os.lseek(given, 0, os.SEEK_SET)
            return False
        self._keep(worker.worker, worker.directory, os.pidfd_open(pid), None)
        return True

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        return {
            (node.name, index): found
            for node in self._nodes
            if not node.virtual
            for index, uuid in enumerate(node.devices)
            if (found := self._meter.read(uuid)) is not None
        }

    def close(self) -> None:
        """Workers run on."""
        if self._warmer is not None:
            self._warmer.close()
            self._warmer = None

    def _env(self, worker: WorkerSpec) -> dict[str, str]:
        node = next(n for n in self._nodes if n.name == worker.node)
        env = {k: os.environ[k] for k in PASSED_ON if k in os.environ} | {"PYTHONUNBUFFERED": "1"}
        if node.virtual:
            threads = max((os.cpu_count() or 1) // node.gpus, 1)
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "SHOAL_DEVICE": "cpu"}
        else:
            env |= {"CUDA_VISIBLE_DEVICES": node.devices[worker.gpu], "SHOAL_DEVICE": "cuda:0"}
        return env | worker.env

    def stop(self, worker: str, *, kill: bool = False) -> None:
        if self._delayed.pop(worker, None) is not None:
            exit_ = Exit(worker, None, None, "it was ended before it began", began=False, told=True)
            asyncio.get_running_loop().call_soon(self._tell, exit_)
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
        elif worker in self._owed:
            self._owed[worker].append(number)

    # Seeing them end

    def _keep(self, worker: str, directory: Path, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self._kept[worker] = _Kept(directory, pidfd, child)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, worker)
        for number in self._owed.pop(worker, []):
            self._signal(worker, number)

    def _ended(self, worker: str) -> None:
        kept = self._kept.pop(worker)
        asyncio.get_running_loop().remove_reader(kept.pidfd)
        os.close(kept.pidfd)
        if kept.child is not None:
            kept.child.wait()
        self._tell(self._exit_of(worker, kept.directory))

    def _exit_of(self, worker: str, directory: Path) -> Exit:
        found = read_json(directory / "exit")
        if found is not None:
            same_boot = found["boot"] and found["boot"] == shim.boot_id()
            ago_s = max(time.monotonic() - found["steady_s"], 0.0) if same_boot else None
            return Exit(worker, found["code"], found["signal"], found["why"], told=found["told"], ago_s=ago_s)
        end_marked(directory)
        began = (directory / "started").exists()
        why = "its keeper was killed" if began else "it was ended before it began"
        return Exit(worker, None, None, why, began=began)

    def _tell(self, exit_: Exit) -> None:
        self.on_exit(exit_)

    def adopt(self, worker: str, directory: Path) -> None:
        self._owed[worker] = []
        task = asyncio.get_running_loop().create_task(self._adopt(worker, directory))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _adopt(self, worker: str, directory: Path) -> None:
        # A keeper that holds its lock but has said nothing yet was started this moment.
        while is_kept(directory) and not (directory / "started").exists():
            await asyncio.sleep(0.02)
        started = read_json(directory / "started")
        if started is not None and is_kept(directory):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(started["keeper_pid"])
                if shim.start_time(started["keeper_pid"]) == started["keeper_start_time"]:
                    self._keep(worker, directory, pidfd, None)
                    return
                os.close(pidfd)
        self._owed.pop(worker, None)
        self._tell(self._exit_of(worker, directory))


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


def end_marked(directory: Path) -> None:
    """Kill the processes that carry the mark of this worker and have lost their keeper."""
    try:
        mark = f"{MARK}={(directory / 'mark').read_text()}".encode()
    except OSError:
        return
    if len(mark) < len(MARK) + 33:
        return
    for _ in range(10):  # until none is found: one may have forked meanwhile
        if not [_kill(pid, mark) for pid in _marked(mark)]:
            return


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _kill(pid: int, mark: bytes) -> None:
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            # Looked at again now that the pidfd holds on to the process: the number cannot change hands.
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
