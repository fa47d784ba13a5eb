"""Warm starts: a process that has imported torch, and forks keepers from itself.

A cold worker spends seconds in imports. A fork of a process that has done them starts in milliseconds. Here the
fork becomes the worker's keeper, and the keeper forks the worker: so a warm worker has a keeper like any other,
and outlives the control plane. What is safe to fork, and what the fork then becomes, is `shoal.torch.zygote`'s
affair. A command that is not `python script.py ...` with the server's own Python is started cold.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

from shoal.executors import shim

MAX_REQUEST_BYTES = 4096
ANSWER_TIMEOUT_S = 0.5


class Warmer:
    """The executor's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.executors.warm", str(theirs.fileno())],
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

    @property
    def ready(self) -> bool:
        """Whether it has done its imports; asked without waiting."""
        if not self._ready and self._process.poll() is None:
            with contextlib.suppress(BlockingIOError, OSError):
                self._ready = bool(self._sock.recv(MAX_REQUEST_BYTES, socket.MSG_DONTWAIT))
        return self._ready and self._process.poll() is None

    @property
    def warming(self) -> bool:
        """Whether it will be ready soon."""
        return not self.ready and self._process.poll() is None

    def start(self, directory: str, given: int, lock: int) -> int | None:
        """The pid of a keeper with the specification in the file `given`; None if it must be started cold."""
        if not self.ready:
            return None
        fds = array.array("i", [given, lock])
        try:
            self._sock.settimeout(ANSWER_TIMEOUT_S)
            self._sock.sendmsg([directory.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            pid = json.loads(self._sock.recv(MAX_REQUEST_BYTES)).get("pid")
        except (OSError, ValueError):
            # It may yet answer a request that was given up: do not use it again.
            self.close()
            return None
        return int(pid) if pid else None

    def close(self) -> None:
        """Its keepers live on."""
        self._ready = False
        self._sock.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)


def may_be_warm(command: tuple[str, ...], env: dict[str, str]) -> bool:
    """Whether the command is a script for the Python that this server runs with."""
    if len(command) < 2 or command[1].startswith("-") or not command[1].endswith(".py"):
        return False
    found = shutil.which(command[0], path=env.get("PATH"))
    # The link is compared, not its end: it is what decides which packages there are.
    return found is not None and os.path.abspath(found) == os.path.abspath(sys.executable)


class WarmKeeper(shim.Keeper):
    """A keeper whose worker is a fork of itself."""

    def begin(self) -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        os.chdir(self.spec["workdir"])
        if not os.path.isfile(self.spec["command"][1]):
            raise FileNotFoundError(2, os.strerror(2), self.spec["command"][1])
        pid = os.fork()
        if pid == 0:
            self._become(write)
        os.close(write)
        os.chdir("/")
        self.child = _Child(pid)
        self.say_started(pid)
        return read

    def _become(self, output: int) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (
                signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGINT,
                signal.SIGHUP,
            ):  # fmt: skip
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
            shim.prctl(shim.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os.environ.clear()
            os.environ.update(self.spec["env"])
            if "PYTHONPATH" in self.spec["env"]:
                sys.path[1:1] = [p for p in self.spec["env"]["PYTHONPATH"].split(os.pathsep) if p]
            from shoal.torch import zygote

            code = zygote._become(
                {
                    "argv": self.spec["command"][1:],
                    "env": self.spec["env"],
                    "cwd": self.spec["workdir"],
                    "output": None,
                }
            )
        finally:
            os._exit(code)


class _Child:
    """As much of a Popen as a keeper needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


def _keep(sock: socket.socket, directory: str, given: int) -> None:
    """In the fork: be the keeper of a worker."""
    try:
        sock.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with os.fdopen(given, "rb") as file:
            spec = json.load(file)
        shim.prctl(shim.PR_SET_CHILD_SUBREAPER, 1)
        WarmKeeper(directory, spec).run()
    finally:
        os._exit(0)


def serve(sock: socket.socket) -> None:
    from shoal.torch.zygote import why_not_fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are seen to end by whoever wants to know
    sock.send(b'{"ready": true}')
    while True:
        body, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 2)
        if not body:
            return
        pid = None
        if why_not_fork() is None and len(fds) == 2:
            pid = os.fork()
            if pid == 0:
                _keep(sock, body.decode(), fds[0])  # the lock stays open for as long as the keeper lives
        for fd in fds:
            os.close(fd)
        sock.send(json.dumps({"pid": pid}).encode())


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shim.prctl(shim.PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        from shoal.torch.zygote import warm_up

        warm_up([])
    except ImportError:
        return  # no torch here: workers start cold
    serve(sock)


if __name__ == "__main__":
    main()
