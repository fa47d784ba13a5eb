"""Workers as processes of this machine, each under a keeper (`keeper.py`) that outlives the control plane.

The executor signals a process only through a pidfd of its keeper, after it has checked pid and start time. So it never
hits another process that has got the same pid. If a keeper itself is killed, `orphans` ends the processes it kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.executors import hidden, keeper
from shoal.executors.accounts import Account, Private, account_for, go_file, remove_files_of
from shoal.executors.base import Exit, GpuUsage, NodeChange, NodeInfo, OwnAccount, WorkerSpec
from shoal.executors.cgroups import Cgroups
from shoal.executors.gpus import UsageMeter, find_gpus, type_word
from shoal.executors.guard import INTERVAL_S, SUSPEND_AND_WAKE, Guarded, pid_of
from shoal.executors.keeper_files import grace_of, is_kept, open_keeper, read_ended
from shoal.executors.logs import Line, read_lines, tail_position
from shoal.executors.orphans import MARK, new_mark
from shoal.executors.pace import Pace
from shoal.executors.passed_on import PASSED_ON
from shoal.executors.secret_files import SecretFiles
from shoal.executors.sessions import Session, SessionError
from shoal.executors.zygote import Zygote, may_start_warm

log = logging.getLogger("shoal.executors")

LOG_FILE_BYTES, LOG_FILES = 8 * 1024 * 1024, 4
GO, GO_AGAIN_S = "go", 0.5
VIRTUAL_TYPE = "virtual"
#: How long a command waits for the worker that it is to run next to.
SESSION_TIMEOUT_S = 10.0
STARTED_TIMEOUT_S = 5.0
"""How long a new keeper may take to write the file `started`."""
ZYGOTE_TIMEOUT_S = 30.0
"""How long a worker waits for the zygote's imports before it starts cold."""


@dataclass
class Delayed:
    """A worker that starts later, and what it was told meanwhile."""

    spec: WorkerSpec
    signals: list[int] = field(default_factory=list)
    may_go: bool = False


class LocalExecutor:
    """Runs workers on the GPUs that NVML finds, or on `virtual_gpus`: then workers run on the CPU.

    All calls must be made on the thread of a running event loop. `zygote` may be shared with other executors. With
    `lease_file`, keepers kill their workers when the time in that file has passed (see `keeper.py`). With `allow_root`,
    an executor that runs as root also runs workers whose owners have no account. `own_files` is a directory that is
    hidden from workers which share its account with those of other users.
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
        cgroups: Cgroups | None = None,
        allow_root: bool = False,
        own_files: Path | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.on_node: Callable[[NodeChange], None] = lambda change: None
        self._nodes, self.why_virtual = _find_nodes(virtual_gpus)
        self._log_file_bytes, self._log_files = log_file_bytes, log_files
        self._lease_file, self._allow_root, self._own_files = lease_file, allow_root, own_files
        self._zygote, self._owns_zygote, self._zygote_s = zygote, False, float("-inf")
        self._usage_meter = UsageMeter()
        self._cgroups = cgroups if cgroups is not None else Cgroups.find()
        self._kept: dict[str, Guarded] = {}
        #: Keepers that this process started.
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: asyncio.Task[None] | None = None
        self._pace = Pace() if pace is None else pace
        #: Workers that wait for the zygote or until fewer keepers start.
        self._delayed: dict[str, Delayed] = {}
        #: Workers that are being adopted, with the signals to send them afterwards.
        self._adopting: dict[str, list[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self._nodes

    def awaited_nodes(self) -> tuple[NodeInfo, ...]:
        return ()

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

    async def session(
        self, worker: str, command: list[str], *, tty: bool, rows: int, columns: int
    ) -> Session:
        """Run a command next to a worker, when that has started. Raises SessionError."""
        deadline_s = time.monotonic() + SESSION_TIMEOUT_S
        while time.monotonic() < deadline_s:
            kept = self._kept.get(worker)
            if kept is not None and (kept.directory / "started").exists():
                return Session(kept.directory, command, tty=tty, rows=rows, columns=columns)
            await asyncio.sleep(0.05)
        raise SessionError(f"worker {worker} does not run here")

    def close(self) -> None:
        if self._zygote is not None and self._owns_zygote:
            self._zygote.close()
        self._zygote = None
        if self._guard is not None:
            self._guard.cancel()
        self._pace.close()

    # Starting

    def start(self, worker: WorkerSpec) -> None:
        self._renew_zygote()
        self._delayed[worker.worker] = Delayed(worker)
        if worker.warm and self._zygote is not None and self._zygote.warming:
            # Its imports end soon, and sooner than all the workers of a job could do their own.
            self._spawn(self._start_when_warm(worker.worker, self._zygote))
        else:
            self._start_in_turn(worker.worker)

    def _renew_zygote(self) -> None:
        """Replace a zygote that was killed, at most once in `ZYGOTE_TIMEOUT_S`."""
        dead = self._zygote is not None and self._owns_zygote and self._zygote.has_ended
        if dead and time.monotonic() - self._zygote_s > ZYGOTE_TIMEOUT_S:
            assert self._zygote is not None
            self._zygote.close()
            self._zygote, self._zygote_s = Zygote(), time.monotonic()

    async def _start_when_warm(self, worker: str, zygote: Zygote) -> None:
        deadline_s = time.monotonic() + ZYGOTE_TIMEOUT_S
        while zygote.warming and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._start_in_turn(worker)

    def _start_in_turn(self, worker: str) -> None:
        """At once if the zygote can start it, else when few keepers start."""
        delayed = self._delayed.get(worker)
        if delayed is None:
            return  # it was ended before it began
        spec = delayed.spec
        is_warm = spec.warm and self._zygote is not None and not self._zygote.has_ended
        if is_warm and may_start_warm(spec.command, spec.env):
            self._start_delayed(worker)
        else:
            self._pace.when_free(partial(self._start_delayed, worker))

    def _start_delayed(self, worker: str) -> None:
        delayed = self._delayed.pop(worker, None)
        if delayed is None:
            return  # it was ended before it began
        self._start_now(delayed.spec)
        if delayed.may_go:
            self.go(worker)
        for number in delayed.signals:
            self._signal(worker, number)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_now(self, worker: WorkerSpec) -> None:
        try:
            worker.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(worker.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    self._start_keeper(worker, lock)
                except BaseException:
                    self._remove_secrets(worker.directory)
                    raise
            finally:
                os.close(lock)
        except Exception as error:  # whatever it is: others start, and this one ends
            if not isinstance(error, OSError):
                log.exception("worker %s was not started", worker.worker)
            why = f"cannot start it: {getattr(error, 'strerror', None) or error}"
            self._emit_soon(Exit(worker.worker, None, None, why, began=False))

    def _start_keeper(self, worker: WorkerSpec, lock: int) -> None:
        account = account_for(worker.account, allow_root=self._allow_root)
        own = _own_files(worker) if account is None else _private_files(worker, account)
        # The home of the account counts, not that of the shell that submitted the job.
        env = self._env(worker) | own | {MARK: new_mark(worker.directory)}
        group = None if self._cgroups is None else self._cgroups.make(worker.directory)
        spec = {
            "command": list(worker.command),
            "workdir": worker.workdir,
            "env": env,
            "grace_s": worker.grace_s,
            "log_file_bytes": self._log_file_bytes,
            "log_files": self._log_files,
            "lease_file": None if self._lease_file is None else str(self._lease_file),
            "cgroup": None if group is None else str(group),
            "account": None if account is None else account.ids(),
        } | self._hidden(worker, env)
        # The specification is passed in memory: neither as an argument, which `ps` shows, nor on disk.
        spec_fd = os.memfd_create("worker", os.MFD_CLOEXEC)
        try:
            os.write(spec_fd, json.dumps(spec).encode())
            os.lseek(spec_fd, 0, os.SEEK_SET)
            child, pid = None, self._start_warm(worker, env, spec_fd, lock)
            if pid is None:
                os.lseek(spec_fd, 0, os.SEEK_SET)
                child = self._start_cold(worker.directory, spec_fd, lock)
                pid = child.pid
        finally:
            os.close(spec_fd)
        try:
            self._keep(worker.worker, worker.directory, os.pidfd_open(pid), worker.grace_s)
        except BaseException:  # too many open files: nothing may run that nobody watches
            os.kill(pid, signal.SIGKILL)
            raise
        if child is not None:
            self._children[worker.worker] = child

    def _hidden(self, worker: WorkerSpec, env: dict[str, str]) -> dict[str, Any]:
        """What the keeper hides from the worker, and what of it the worker needs."""
        shared = isinstance(worker.account, OwnAccount) and worker.account.shared and os.geteuid() != 0
        if not shared or self._own_files is None or hidden.why_not():
            return {}
        needed = [
            env.get("SHOAL_JOB_DIR"),
            worker.workdir if worker.tree else None,
        ]  # else a user has chosen it
        return hidden.plan(self._own_files, [path for path in needed if path], [str(worker.directory)])

    def _start_warm(self, worker: WorkerSpec, env: dict[str, str], spec_fd: int, lock: int) -> int | None:
        if self._zygote is None or not worker.warm or not may_start_warm(worker.command, env):
            return None
        return self._zygote.start(str(worker.directory), spec_fd, lock)

    def _start_cold(self, directory: Path, spec_fd: int, lock: int) -> subprocess.Popen[bytes]:
        run_keeper = os.path.join(os.path.dirname(keeper.__file__), "run_keeper.py")
        started, starts = os.pipe2(os.O_CLOEXEC)
        signal.pthread_sigmask(signal.SIG_BLOCK, keeper.BLOCKED_AT_START)
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", run_keeper, str(directory), str(lock)],
                stdin=spec_fd,
                stdout=starts,  # which it closes when it has started
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),  # held for as long as the keeper lives
                start_new_session=True,
                cwd="/",
                env={},
            )
        except BaseException:
            os.close(started)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, keeper.BLOCKED_AT_START)
            os.close(starts)
        self._pace.watch(started)
        return child

    def _env(self, worker: WorkerSpec) -> dict[str, str]:
        node = next(n for n in self._nodes if n.name == worker.node)
        env = {k: os.environ[k] for k in PASSED_ON if k in os.environ} | {"PYTHONUNBUFFERED": "1"}
        if node.virtual:
            threads = max((os.cpu_count() or 1) // node.gpus, 1)
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "SHOAL_DEVICE": "cpu"}
        else:
            seen = worker.visible_gpus
            env |= {
                "CUDA_VISIBLE_DEVICES": ",".join(node.devices[gpu] for gpu in seen),
                "SHOAL_DEVICE": f"cuda:{seen.index(worker.gpu)}",
            }
        return env | worker.env

    # Stopping and suspending

    def stop(self, worker: str, *, kill: bool = False) -> None:
        if self._delayed.pop(worker, None) is not None:
            why = "it was ended before it began"
            self._emit_soon(Exit(worker, None, None, why, began=False, asked_to_end=True))
            return
        if worker in self._kept:
            self._kept[worker].told_to_end(kill=kill)
        self._signal(worker, signal.SIGQUIT if kill else signal.SIGTERM)

    def suspend(self, worker: str) -> None:
        self._signal(worker, signal.SIGUSR1)

    def wake(self, worker: str) -> None:
        self._signal(worker, signal.SIGUSR2)

    def warn(self, worker: str, signal: str) -> None:
        number = keeper.WARNINGS.get(signal)
        if number is not None:
            self._signal(worker, keeper.FIRST_WARNING + number)

    def go(self, worker: str) -> None:
        kept = self._kept.get(worker)
        if worker in self._delayed:
            self._delayed[worker].may_go = True
            return
        if kept is None and worker not in self._adopting:
            return  # it has ended
        try:
            if kept is None:
                raise FileNotFoundError  # its directory is known when it is adopted
            (kept.directory / GO).touch()
        except OSError:  # a disk that is full may have room again by then
            asyncio.get_running_loop().call_later(GO_AGAIN_S, self.go, worker)

    def free_port(self, node: str) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def _signal(self, worker: str, number: int) -> None:
        kept = self._kept.get(worker)
        if kept is not None:
            kept.tell(number)
        elif worker in self._adopting:
            _put_off(self._adopting[worker], number)
        elif worker in self._delayed:
            _put_off(self._delayed[worker].signals, number)

    # Watching keepers

    def _keep(self, worker: str, directory: Path, pidfd: int, grace_s: float) -> None:
        group = None if self._cgroups is None else self._cgroups.of(directory)
        self._kept[worker] = Guarded(directory, pid_of(pidfd), pidfd, grace_s, group)
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._ended, worker)
        if self._guard is None:
            self._guard = loop.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not self._kept:
                continue
            # One look at all processes serves all workers: it takes milliseconds.
            children = keeper.children_of_all()
            for kept in list(self._kept.values()):
                kept.look(children)

    def _ended(self, worker: str) -> None:
        kept = self._kept.pop(worker)
        asyncio.get_running_loop().remove_reader(kept.pidfd)
        os.close(kept.pidfd)
        # A keeper that ends by itself has left nothing behind. How other processes' children end is not known.
        status = self._children.pop(worker).wait() if worker in self._children else None
        if status is not None and status < 0:
            with contextlib.suppress(OSError):
                (kept.directory / "exit").unlink()  # it was killed: somebody else wrote this
        if status != 0:
            kept.clean_up()
        self._report(worker, kept)

    def _report(self, worker: str, kept: Guarded) -> None:
        """Report the end of a worker once none of its processes is left."""
        if kept.is_clean():
            self._remove_secrets(kept.directory)
            self._emit(self._exit_of(worker, kept.directory))
        else:
            kept.clean_up()
            asyncio.get_running_loop().call_later(0.05, self._report, worker, kept)

    def _remove_secrets(self, directory: Path) -> None:
        SecretFiles(directory).remove()
        remove_files_of(directory)

    def _exit_of(self, worker: str, directory: Path) -> Exit:
        found = read_ended(directory)
        if found is not None:
            return Exit(
                worker,
                found.code,
                found.signal,
                found.why,
                asked_to_end=found.told,
                ago_s=found.ago_s,
                node_lost=found.lease_ended,
            )
        began = (directory / "started").exists()
        why = "its keeper was killed" if began else "it was ended before it began"
        return Exit(worker, None, None, why, began=began)

    def _emit(self, exit_: Exit) -> None:
        self.on_exit(exit_)

    def _emit_soon(self, exit_: Exit) -> None:
        asyncio.get_running_loop().call_soon(self._emit, exit_)

    def adopt(self, worker: str, directory: Path) -> None:
        self._adopting[worker] = []
        self._spawn(self._adopt(worker, directory))

    async def _adopt(self, worker: str, directory: Path) -> None:
        # A keeper that holds its lock but has not written `started` was started this moment, or a job removed the file.
        deadline_s = time.monotonic() + STARTED_TIMEOUT_S
        while is_kept(directory) and not (directory / "started").exists() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        pidfd = open_keeper(directory) if is_kept(directory) else None
        signals = self._adopting.pop(worker)
        if pidfd is None:
            group = None if self._cgroups is None else self._cgroups.of(directory)
            kept = Guarded(directory, 0, -1, 0.0, group)
            kept.clean_up()
            self._report(worker, kept)
            return
        self._keep(worker, directory, pidfd, grace_of(directory))
        for number in signals:
            self._signal(worker, number)


def _put_off(signals: list[int], number: int) -> None:
    """Of suspend and wake, only the last counts."""
    if number in SUSPEND_AND_WAKE:
        signals[:] = [other for other in signals if other not in SUSPEND_AND_WAKE]
    signals.append(number)


def _find_nodes(virtual_gpus: int | None) -> tuple[tuple[NodeInfo, ...], str]:
    """The nodes of this machine, and why they are virtual if nobody asked for that."""
    why = ""
    if virtual_gpus == 0:
        return (), ""
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


def _own_files(worker: WorkerSpec) -> dict[str, str]:
    """Make the files that a worker under this process's account reads; return the variables that name them."""
    files = SecretFiles(worker.directory)
    files.write(worker.secret_files)
    go = {"SHOAL_GO": str(worker.directory / GO)} if worker.waits_for_go else {}
    return files.env(worker.secret_files) | go


def _private_files(worker: WorkerSpec, account: Account) -> dict[str, str]:
    """The same for a worker under another account, which cannot enter the worker's directory."""
    private = Private(account, worker.directory, worker.worker)
    env = account.env() | private.write_secrets(worker.secret_files)
    if "SHOAL_JOB_DIR" in worker.env:
        env["SHOAL_JOB_DIR"] = str(private.job_directory())
    if worker.waits_for_go:
        env["SHOAL_GO"] = str(go_file(worker.directory))
        (worker.directory / GO).symlink_to(env["SHOAL_GO"])  # `go` makes the file that it leads to
    return env
