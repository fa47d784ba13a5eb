"""Warm starts: a process that has imported torch and forks keepers of workers from itself.

A cold worker spends seconds on imports (torch, and with the first optimizer another thousand modules). A fork of a
process that has done them starts in milliseconds. The fork becomes the worker's keeper, and the keeper forks the
worker: a warm worker has a keeper like any other and outlives the control plane. Both forks are made ahead of time.

A fork is safe (measured: docs/design/010-reconfigure.md) if the process has one thread, torch was limited to one
thread before its first operation, and CUDA was never initialised. The zygote checks this before each fork. If it
refuses, or if the command is not `python script.py ...` with the Python of this process, the worker starts cold.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from shoal.executors import keeper
from shoal.executors.orphans import MARK, MARK_BYTES
from shoal.executors.passed_on import PASSED_ON

MAX_REQUEST_BYTES = 4096
ANSWER_TIMEOUT_S = 0.5


class Zygote:
    """The executor's end. Several executors of a process may share one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Workers are forks of it, under the accounts of their owners: it knows nothing that they may not.
        env = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
        # One thread until after the fork: libgomp's thread pool does not survive it.
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env[MARK] = "0" * 2 * MARK_BYTES  # each worker writes its own mark in this place
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.executors.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        theirs.close()
        self._sock = ours
        self._ready = False
        self._asking = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether it has done its imports. Does not wait."""
        if not self._ready and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._ready = bool(self._sock.recv(MAX_REQUEST_BYTES, socket.MSG_DONTWAIT))
        return self._ready and self._process.poll() is None

    @property
    def warming(self) -> bool:
        """Whether it still does its imports."""
        return not self.ready and self._process.poll() is None

    def wait_ready(self, timeout_s: float = 60.0) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.warming and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return self.ready

    def start(self, directory: str, spec_fd: int, lock_fd: int) -> int | None:
        """Start a keeper with the specification in the file `spec_fd`. Return its pid, or None: start it cold.

        The keeper begins when it is told that its pid has arrived here. So a request that is answered too late does not
        start a second worker beside the cold one.
        """
        with self._asking:
            if not self.ready:
                return None
            told, tell = os.pipe2(os.O_CLOEXEC)
            try:
                fds = array.array("i", [spec_fd, lock_fd, told])
                self._sock.settimeout(ANSWER_TIMEOUT_S)
                self._sock.sendmsg([directory.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                pid = json.loads(self._sock.recv(MAX_REQUEST_BYTES)).get("pid")
                if pid:
                    os.write(tell, b"1")
            except (OSError, ValueError):
                # It may still answer this request later: do not use it again.
                self.close()
                return None
            finally:
                os.close(told)
                os.close(tell)
        return int(pid) if pid else None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it. The keepers that it has started live on."""
        self._ready = False
        self._sock.close()
        self._process.kill()  # it has nothing to save, and may be stopped
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)


def may_start_warm(command: tuple[str, ...], env: dict[str, str]) -> bool:
    """Whether the command is a script for the Python that this process runs with."""
    if len(command) < 2 or command[1].startswith("-") or not command[1].endswith(".py"):
        return False
    found = shutil.which(command[0], path=env.get("PATH"))
    if found is None:
        return False
    # `python` and `python3` of one directory are the same Python with the same packages. The directory counts too: the
    # path of a link decides which packages there are.
    here, there = os.path.abspath(sys.executable), os.path.abspath(found)
    return os.path.dirname(here) == os.path.dirname(there) and os.path.realpath(here) == os.path.realpath(
        there
    )


# The zygote process


def why_not_fork() -> str | None:
    """The reason why a fork of this process would not be safe, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    if torch is not None and torch.get_num_threads() != 1:
        return "torch may have started threads"
    if len(os.listdir("/proc/self/task")) != 1:
        return "the process has several threads"
    return None


def warm_up() -> None:
    """Import what a training script needs."""
    import torch

    torch.set_num_threads(1)
    import torch.distributed.fsdp  # for sharded models; it takes seconds, too

    # The first optimizer imports torch._dynamo: most of what a cold start costs after torch itself.
    weight = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    weight(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    importlib.import_module("shoal.torch")
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, the pages that it shares with this process


def serve(sock: socket.socket) -> None:
    """Give each request to a keeper that was forked beforehand, until the executor's end closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # executors watch keepers through pidfds
    signal.pthread_sigmask(signal.SIG_BLOCK, keeper.BLOCKED_AT_START)
    spare = _fork_spare(sock)
    sock.send(b'{"ready": true}')
    while True:
        body, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 3)
        if not body:
            return
        pid = spare.give(body, fds) if spare is not None else None
        for fd in fds:
            os.close(fd)
        sock.send(json.dumps({"pid": pid}).encode())
        spare = _fork_spare(sock)


@dataclass(frozen=True, slots=True)
class Spare:
    """A keeper and its worker, forked ahead of time: a fork of a process this large takes tens of milliseconds."""

    pid: int
    sock: socket.socket

    def give(self, directory: bytes, fds: list[int]) -> int | None:
        """Let it keep the worker in this directory. Return its pid, or None if it has died."""
        with self.sock:
            try:
                socket.send_fds(self.sock, [directory], fds)
            except OSError:
                return None
        return self.pid


def _fork_spare(sock: socket.socket) -> Spare | None:
    if why_not_fork() is not None:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        sock.close()
        ours.close()
        _keep(theirs)
    theirs.close()
    return Spare(pid, ours)


def _keep(sock: socket.socket) -> None:
    """In the first fork: fork a worker, wait for a request, and run as the worker's keeper."""
    try:
        worker = _fork_worker(sock)
        body, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 3)
        if not body or not os.read(fds[2], 1):  # the zygote has ended, or the executor does not wait any more
            return
        sock.close()
        os.close(fds[2])
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with os.fdopen(fds[0], "rb") as file:  # fds[1], the lock, stays open for as long as the keeper lives
            spec = json.load(file)
        keeper.prctl(keeper.PR_SET_CHILD_SUBREAPER, 1)
        WarmKeeper(body.decode(), spec, worker).run()
    finally:
        os._exit(0)


@dataclass(frozen=True, slots=True)
class WaitingWorker:
    """A fork of the keeper that waits for its specification."""

    pid: int
    spec_fd: int  # write the specification here
    output_fd: int  # read its output here


class WarmKeeper(keeper.Keeper):
    """A keeper whose worker is a fork of itself."""

    def __init__(self, directory: str, spec: dict[str, Any], worker: WaitingWorker) -> None:
        super().__init__(directory, spec)
        self.worker = worker

    def begin(self) -> int:
        if self.spec.get("account") is None:
            os.chdir(self.spec["workdir"])
            if not os.path.isfile(self.spec["command"][1]):
                raise FileNotFoundError(2, os.strerror(2), self.spec["command"][1])
            os.chdir("/")
        # Else root would tell the job which files exist: the worker looks for itself, under its account.
        keeper.give_to_account(self.worker.output_fd, self.spec)
        try:
            with os.fdopen(self.worker.spec_fd, "w") as file:
                json.dump(self.spec, file)
        except BrokenPipeError:  # somebody has killed the waiting worker: the kernel, for want of memory
            os.close(self.worker.output_fd)
            return super().begin()
        self.pid = self.worker.pid
        return self.worker.output_fd


def _fork_worker(sock: socket.socket) -> WaitingWorker:
    read_spec, write_spec = os.pipe2(os.O_CLOEXEC)
    read_output, write_output = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_output, False)
    pid = os.fork()
    if pid == 0:
        for fd in (sock.detach(), write_spec, read_output):
            os.close(fd)
        _become_worker(read_spec, write_output)
    os.close(read_spec)
    os.close(write_output)
    return WaitingWorker(pid, write_spec, read_output)


def _become_worker(spec_fd: int, output_fd: int) -> None:
    """In the second fork: become the process that `python script.py args` would have been."""
    code = 1
    try:
        os.setsid()
        keeper.prctl(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)
        with os.fdopen(spec_fd) as file:
            text = file.read()
        if not text:  # the keeper has ended, or could not start the worker
            return
        spec = json.loads(text)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        keeper.confine(spec)
        keeper.prctl(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the account has cleared it
        _reset_signals()
        _show_mark(spec["env"].get(MARK, ""))
        os.chdir(spec["workdir"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(spec["env"])
        code = _run_script(list(spec["command"][1:]), spec["env"])
    except OSError as error:  # of `confine`: the account may not enter the directory
        os.write(2, f"cannot start {error.filename or spec['command'][0]!r}: {error.strerror}\n".encode())
        code = 126
    finally:
        os._exit(code)


def _show_mark(mark: str) -> None:
    """Write the worker's mark where the kernel shows this process's environment: a fork has that of the zygote.

    Processes that the worker forks are then found by it (`orphans`), like those that it starts as commands.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(MARK.encode())
    if place is not None and len(mark) == 2 * MARK_BYTES:
        ctypes.memmove(place, mark.encode(), len(mark))


def _reset_signals() -> None:
    """Undo what the zygote has set: it ignores SIGCHLD and SIGINT, and blocks what a starting keeper cannot obey."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, keeper.BLOCKED_AT_START)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_script(argv: list[str], env: dict[str, str]) -> int:
    """Run the script as `__main__`. Return its exit code."""
    import torch

    if not os.path.isfile(argv[0]):  # as `python` says it
        print(f"{sys.executable}: can't open file {argv[0]!r}: No such file or directory", file=sys.stderr)
        return 2
    torch.seed()
    random.seed()
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    sys.path[1:1] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper.prctl(keeper.PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        warm_up()
    except ImportError:
        return  # without torch, workers start cold
    with contextlib.suppress(ConnectionError):  # the executor's process has ended
        serve(sock)


if __name__ == "__main__":
    main()
