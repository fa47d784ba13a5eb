"""Warm starts: a process that has imported torch and forks workers from itself.

A cold worker spends seconds in imports (torch, and with the first optimizer another thousand modules). A fork of a
process that has done this starts in milliseconds. What is safe to fork (measured: docs/design/010-reconfigure.md):
no thread but the main one, torch limited to one thread before its first operation, CUDA never initialised. The
zygote checks this before each fork and refuses otherwise; the caller then starts the worker cold.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

MAX_REQUEST_BYTES = 1 << 20


class Zygote:
    """The parent's end: start one, ask it for workers, hear of their ends."""

    def __init__(
        self, on_exit: Callable[[int, int], None] | None = None, preload: tuple[str, ...] = ()
    ) -> None:
        """`on_exit(pid, code)` is called in a thread of its own; a negative code is a signal."""
        self.listeners = [on_exit] if on_exit is not None else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        # One thread until after the fork: libgomp's pool does not survive it.
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.torch.zygote", str(theirs.fileno()), *preload],
            pass_fds=[theirs.fileno()],
            env=env,
        )
        theirs.close()
        self._sock = ours
        self._answers: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._closed = False
        self.ready = False
        threading.Thread(target=self._listen, name="zygote", daemon=True).start()

    def wait_ready(self, timeout_s: float = 60.0) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self._closed, timeout_s)
            return self.ready

    def start(self, argv: list[str], env: dict[str, str], cwd: str, output: str | None) -> int | None:
        """The pid of a new worker that runs `argv` as a script; None if it must be started cold."""
        if not self.ready or self._closed:
            return None
        request = json.dumps({"argv": argv, "env": env, "cwd": cwd, "output": output}).encode()
        if len(request) > MAX_REQUEST_BYTES:
            return None
        with self._asking:
            try:
                self._sock.send(request)
            except OSError:
                return None
            with self._changed:
                self._changed.wait_for(lambda: self._answers or self._closed, 10.0)
                answer = self._answers.pop() if self._answers else {}
        return answer.get("pid")

    def close(self) -> None:
        self._closed = True
        self._sock.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while body := self._sock.recv(MAX_REQUEST_BYTES):
                message = json.loads(body)
                if "exited" in message:
                    for listener in list(self.listeners):
                        listener(message["exited"], message["code"])
                    continue
                with self._changed:
                    if "ready" in message:
                        self.ready = True
                    else:
                        self._answers.append(message)
                    self._changed.notify_all()
        with self._changed:
            self._closed, self.ready = True, False
            self._changed.notify_all()


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


def warm_up(preload: list[str]) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    # The first optimizer imports torch._dynamo: most of what a cold start costs after torch itself.
    weight = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    weight(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    importlib.import_module("shoal.torch")
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, the pages shared with the children


def serve(sock: socket.socket) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    sock.send(json.dumps({"ready": True}).encode())
    while True:
        readable, _, _ = select.select([sock, wake_read], [], [])
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(sock)
        if sock in readable:
            body = sock.recv(MAX_REQUEST_BYTES)
            if not body:
                return
            _fork(sock, json.loads(body), (wake_read, wake_write))


def _reap(sock: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        sock.send(json.dumps({"exited": pid, "code": code}).encode())


def _fork(sock: socket.socket, request: dict[str, Any], fds: tuple[int, int]) -> None:
    reason = why_not_fork()
    if reason is not None:
        sock.send(json.dumps({"refused": reason}).encode())
        return
    pid = os.fork()
    if pid:
        sock.send(json.dumps({"pid": pid}).encode())
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock.close()
        for fd in fds:
            os.close(fd)
        code = _become(request)
    finally:
        os._exit(code)


def _become(request: dict[str, Any]) -> int:
    """In the child: be the process that `python script.py args` would have been."""
    os.setsid()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["output"]:
        fd = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    import atexit
    import random

    import torch

    torch.seed()
    random.seed()
    torch.set_num_threads(int(request["env"].get("OMP_NUM_THREADS", "1")))
    sys.argv = list(request["argv"])
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else (1 if end.code else 0)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
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
    warm_up(sys.argv[2:])
    with contextlib.suppress(ConnectionError):  # whoever it served has gone
        serve(sock)


if __name__ == "__main__":
    main()
