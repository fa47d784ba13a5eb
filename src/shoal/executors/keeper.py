"""The keeper of one worker: a small process that outlives the control plane.

It starts the command, writes its output to capped log files with a time stamp on each line, stops it on request, and
records on disk how it ended. If the control plane dies and comes back, the worker has kept running, its output is
complete, and its exit code is known. This file uses the standard library only. `run_keeper.py` runs it as a process,
which reads a specification (JSON: command, workdir, env, grace_s, ...) from its standard input.

Files in DIRECTORY: `started` (JSON, written when the command runs), `exit` (JSON, written when all processes have
ended), `log.OFFSET` (output; OFFSET is the position of the file's first byte in the whole output), `sessions` (a
socket, see session_port.py).
With `lease_file` in the specification, the worker lives under a lease: the keeper kills it when CLOCK_BOOTTIME passes
the number of seconds in that file.
Signals to it: TERM stop with grace, QUIT stop at once, USR1 suspend, USR2 resume. FIRST_WARNING + n sends the command
signal n.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time

if __name__ == "keeper":  # `run_keeper.py` imports it without its package
    from hidden import hide  # type: ignore[import-not-found]
    from session_port import SessionPort, kill_below  # type: ignore[import-not-found]
else:
    from shoal.executors.hidden import hide
    from shoal.executors.session_port import SessionPort, kill_below

TYPE_CHECKING = False
if TYPE_CHECKING:  # these imports would slow down every start
    from collections.abc import Iterable
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
#: Signals that a command may ask for as a warning. The keeper gets FIRST_WARNING + n to send n.
WARNINGS = {name: int(getattr(signal, f"SIG{name}")) for name in ("USR1", "USR2", "HUP", "INT", "TERM")}
FIRST_WARNING = int(signal.SIGRTMIN)
#: Requests that would end a keeper which cannot obey yet. Whoever starts one blocks them, and it unblocks them.
BLOCKED_AT_START = (signal.SIGUSR1, signal.SIGUSR2, *(FIRST_WARNING + number for number in WARNINGS.values()))
REQUESTS = (signal.SIGTERM, signal.SIGQUIT, *BLOCKED_AT_START)
AFTERMATH_S = 1.0
"""Time between the end of the command and the killing of processes that it left behind."""
LONGEST_LINE = 16 * 1024
LEASE_CHECK_S = 1.0
LEASE_WHY = "the lease of its node ended: the agent could not reach the control plane"


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_time(pid: int) -> int | None:
    """When the process started, in ticks since boot. None if it does not exist or has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] == b"Z" else int(fields[19])


def boot_clock_s() -> float:
    """Seconds since boot. It counts while the machine is suspended, and nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Identifies the current boot. `time.monotonic()` of two processes is comparable only within one boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def write_json(path: str, value: object, *, synced: bool = True) -> None:
    """Write it completely or not at all. `synced`: it survives the machine, not only this process."""
    temporary = f"{path}.new"
    with open(temporary, "w") as file:
        json.dump(value, file)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


Children = dict[int, list[int]]


def children_of_all() -> Children:
    """The children of every process."""
    children: Children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except OSError:
                continue
            fields = stat[stat.rindex(b")") + 2 :].split()
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    return children


def descendants(root: int | None = None, children: Children | None = None) -> list[int]:
    """All processes below `root`, by default below this one. A keeper inherits those whose parents ended."""
    if children is None:
        children = children_of_all()
    found: list[int] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def confine(spec: dict[str, Any]) -> None:
    """In a worker's process, before its command runs: enter its control group and become its account."""
    if spec.get("cgroup") is not None:
        with open(os.path.join(spec["cgroup"], "cgroup.procs"), "w") as file:
            file.write("0")
    if spec.get("hidden") is not None:
        hide(spec["hidden"], spec["given_back"], spec["read_only"])
        os.chdir(spec["workdir"])  # it was entered before
    if spec.get("account") is not None:
        os.setgroups(spec["account"]["groups"])
        os.setgid(spec["account"]["gid"])
        os.setuid(spec["account"]["uid"])
        os.umask(0o022)
        prctl(PR_SET_DUMPABLE, 1)  # as for any other process of the account: /proc/self is its own
        os.chdir(spec["workdir"])  # as this account, who may not enter every directory


def give_to_account(fd: int, spec: dict[str, Any]) -> None:
    """Let the worker's account open this pipe or terminal by name, as /dev/stderr does."""
    if spec.get("account") is not None:
        os.fchown(fd, spec["account"]["uid"], spec["account"]["gid"])


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


#: The time stamp and a space before each line, and the newline.
STAMP_BYTES = 29


class Log:
    """Lines with time stamps, in files of at most `file_bytes`. The newest `files` are kept."""

    def __init__(self, directory: str, file_bytes: int, files: int) -> None:
        self.directory, self.file_bytes, self.files = directory, file_bytes, files
        self.offset, self.begin, self.lost = 0, 0, 0
        self.torn = False  # the last line that was written has no end
        # The wall clock is read once, so that setting the clock does not change the order of lines. `started` has the
        # offset: with it, whoever reads the lines knows their times on the clock of the boot.
        self.wall_offset_s = time.time() - boot_clock_s()
        self.file = open(os.path.join(directory, "log.0"), "ab", buffering=0)  # noqa: SIM115
        self.rest = b""

    def take(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            lines.append(self.rest)
            self.rest = b""
        self.write(lines)

    def end(self) -> None:
        if self.rest or self.lost:  # an empty line carries the note about lost output
            self.write([self.rest])
        self.rest = b""

    def write(self, lines: list[bytes]) -> None:
        """Write lines and start a new file whenever one is full: much output may arrive at once."""
        part: list[bytes] = []
        size = 0
        for line in lines:
            part.append(line)
            size += len(line) + STAMP_BYTES
            if size >= self.file_bytes - (self.offset - self.begin):
                self.append(part)
                part, size = [], 0
        if part:
            self.append(part)

    def append(self, lines: list[bytes]) -> None:
        now = self.wall_offset_s + boot_clock_s()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z "
        out = bytearray()
        for line in lines:
            # Of a line that was overwritten with carriage returns, the last version is kept.
            shown = next((part for part in reversed(line.split(b"\r")) if part), b"")
            while True:
                out += stamp.encode() + shown[:LONGEST_LINE] + b"\n"
                shown = shown[LONGEST_LINE:]
                if not shown:
                    break
        try:
            if self.lost:
                note = f"{stamp}[{self.lost} bytes of output were lost: the disk was full]\n"
                out[:0] = (("\n" if self.torn else "") + note).encode()
            written = self.file.write(out) or 0
            self.offset += written
            self.lost = len(out) - written
            self.torn = out[written - 1 : written] != b"\n" if written else self.torn
        except OSError:
            self.lost += len(out)
        if self.offset - self.begin >= self.file_bytes and not self.torn:
            self.rotate()

    def rotate(self) -> None:
        try:
            new = open(os.path.join(self.directory, f"log.{self.offset}"), "ab", buffering=0)  # noqa: SIM115
        except OSError:
            return
        self.file.close()
        self.file, self.begin = new, self.offset
        kept = sorted(
            (int(n[4:]) for n in os.listdir(self.directory) if n.startswith("log.") and n[4:].isdigit()),
            reverse=True,
        )
        for offset in kept[self.files :]:
            os.unlink(os.path.join(self.directory, f"log.{offset}"))


class Keeper:
    def __init__(self, directory: str, spec: dict[str, Any]) -> None:
        self.umask = os.umask(0o077)  # nobody else reads what a job prints
        self.directory, self.spec = directory, spec
        self.log = Log(directory, spec["log_file_bytes"], spec["log_files"])
        self.pid = 0  # of the command
        self.status: int | None = None  # exit code of the command, once it has ended
        self.kill_at: float | None = None
        self.told = False  # it was asked to stop before it ended
        self.suspended = False
        self.asked: list[int] = []  # signals not handled yet
        self.lease_until_s = 0.0  # of CLOCK_BOOTTIME
        self.lease_ended = False

    def run(self) -> None:
        wake = self.catch_signals()
        if self.is_lease_over():
            self.lease_ended = True
            self.finish(None, None, LEASE_WHY)
            return
        selector = selectors.DefaultSelector()
        self.sessions = self.session_port(selector)
        with contextlib.suppress(OSError):  # on a full disk there are no sessions
            self.sessions.listen(self.directory)
        try:
            output = self.begin()
            self.record_start()
        except OSError as error:
            self.could_not_start(error)
            return
        os.dup2(0, 1)  # whoever started this process sees that it has started: see pace.py
        selector.register(wake, selectors.EVENT_READ)
        selector.register(output, selectors.EVENT_READ)
        is_open = True
        while True:
            for key, _ in selector.select(self.next_timeout_s()):
                if key.fd == wake:
                    self.asked += [number for number in os.read(wake, 4096) if number in REQUESTS]
                elif key.data is not None:
                    with contextlib.suppress(OSError):
                        key.data()
                else:
                    data = os.read(output, 65536)
                    self.log.take(data)
                    if not data:
                        selector.unregister(output)
                        is_open = False
            self.obey()
            self.enforce_lease()
            if self.reap():
                break
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_all()
        if is_open:
            self.drain(output)
        self.log.end()
        self.sessions.end(self.directory)
        self.record_end()

    def session_port(self, selector: selectors.BaseSelector) -> SessionPort:
        def kill(pid: int) -> None:
            kill_below(pid, descendants)

        def why_not() -> str:
            return "its job is paused" if self.suspended else "its worker ends" if self.kill_at else ""

        return SessionPort(self.spec, selector, self.prepare, give_to_account, kill, why_not)

    def catch_signals(self) -> int:
        """Return a file descriptor that wakes the main loop, with the numbers of the signals as they arrived.

        Handlers in Python are called later, and in the order of the numbers.
        """
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        for number in (*REQUESTS, signal.SIGCHLD):
            signal.signal(number, lambda n, f: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_AT_START)
        return wake_r

    def begin(self) -> int:
        """Start the command, set `pid`, and return the reading end of its output."""
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        give_to_account(write, self.spec)
        try:
            child = self.popen(write)
        except subprocess.SubprocessError:  # `prepare` failed
            name = self.spec["workdir"]
            raise PermissionError(13, "its account may not start in this directory", name) from None
        os.close(write)
        self.pid = child.pid
        child.returncode = 0  # `reap` waits for it: Popen must not
        return read

    def prepare(self) -> None:
        """In a new process, before its command runs."""
        os.umask(self.umask)
        confine(self.spec)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the account has changed, which clears it
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    def popen(self, write: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.spec["command"],
            # `confine` goes to the directory of an account: root would find out for the job what exists.
            cwd=self.spec["workdir"] if self.spec.get("account") is None else "/",
            env=self.spec["env"],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
            preexec_fn=self.prepare,
        )

    def record_start(self) -> None:
        started = {"pid": self.pid, "start_time": start_time(self.pid)}
        keeper = {"keeper_pid": os.getpid(), "keeper_start_time": start_time(os.getpid())}
        clock = {"wall_offset_s": self.log.wall_offset_s, "boot": boot_id()}
        write_json(
            os.path.join(self.directory, "started"),
            started | keeper | clock | {"grace_s": self.spec["grace_s"]},
            synced=False,  # after a crash of the machine nothing of it is true
        )

    def could_not_start(self, error: OSError) -> None:
        missing = isinstance(error, FileNotFoundError)
        what = error.filename if error.filename else self.spec["command"][0]
        why = f"cannot start {what!r}: {error.strerror or error}"
        if what == self.spec["workdir"] and (missing or isinstance(error, NotADirectoryError)):
            node = self.spec["env"].get("SHOAL_NODE")
            where = f"on node {node}" if node else "on this machine"
            why = (
                f"the working directory {what!r} does not exist {where}: `--upload` sends it there, or use a path that "
                "all machines share"
            )
        self.log.write([why.encode(errors="replace")])
        self.finish(127 if missing else 126, None, why)

    def next_timeout_s(self) -> float | None:
        """How long the main loop may wait without an event."""
        if self.kill_at is None:
            idle_s = None if self.spec.get("lease_file") is None else LEASE_CHECK_S
            return idle_s if self.status is None else 0.1
        return min(max(self.kill_at - time.monotonic(), 0.02), 0.1 if self.status is not None else 3600.0)

    def obey(self) -> None:
        asked, self.asked = self.asked, []
        for number in asked:
            if number == signal.SIGUSR1:
                self.suspended = True
                send_signal(descendants(), signal.SIGSTOP)
            elif number == signal.SIGUSR2:
                self.suspended = False
                send_signal(descendants(), signal.SIGCONT)
            elif number > FIRST_WARNING:
                send_signal([self.pid] if self.status is None else [], number - FIRST_WARNING)
            else:
                self.stop(self.spec["grace_s"] if number == signal.SIGTERM else 0.0)

    def stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.told = self.told or self.status is None
        # Only the command itself gets SIGTERM: it may need its children to save its state.
        if grace_s:
            send_signal([self.pid] if self.status is None else descendants(), signal.SIGTERM)
        else:
            self.kill_all()
        send_signal(descendants(), signal.SIGCONT)

    def kill_all(self) -> None:
        if self.spec.get("cgroup") is not None:
            with (
                contextlib.suppress(OSError),
                open(os.path.join(self.spec["cgroup"], "cgroup.kill"), "w") as file,
            ):
                file.write("1")
        send_signal(descendants(), signal.SIGKILL)

    def is_lease_over(self) -> bool:
        """Whether the lease has ended. The agent renews it: it replaces the file, which contains the new end."""
        path = self.spec.get("lease_file")
        now_s = boot_clock_s()
        if path is None or now_s < self.lease_until_s:
            return False
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            self.lease_until_s = float(file.read())
        return now_s >= self.lease_until_s

    def enforce_lease(self) -> None:
        """Kill the worker at once when its lease ends: its GPU may be given to another job soon."""
        if self.is_lease_over():
            self.lease_ended, self.kill_at = True, time.monotonic()

    def reap(self) -> bool:
        """Whether no process is left below. A scan of /proc may miss a process that forks; waitpid does not."""
        had_ended = self.status is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                break
            self.sessions.ended(pid, status)
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
        if self.status is not None and not had_ended:
            send_signal(descendants(), signal.SIGTERM)
            if self.kill_at is None:
                self.kill_at = time.monotonic() + AFTERMATH_S
        return False

    def drain(self, output: int) -> None:
        while True:
            try:
                data = os.read(output, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            self.log.take(data)

    def record_end(self) -> None:
        status = self.status if self.status is not None else 1
        code, name = (status, None) if status >= 0 else (None, f"SIG{-status}")
        if status < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-status).name
        # A command that ended by itself just before, or whose children were left, was not ended by the lease.
        self.lease_ended = self.lease_ended and status == -signal.SIGKILL
        why = LEASE_WHY if self.lease_ended else "it was told to end" if self.told else ""
        self.finish(code, name, why)
        self.log.end()  # on a full disk `finish` waited for room: now there is room for the note about lost output

    def finish(self, code: int | None, name: str | None, why: str) -> None:
        now = {"steady_s": time.monotonic(), "boot": boot_id()}
        end = {"code": code, "signal": name, "why": why, "told": self.told, "lease_ended": self.lease_ended}
        path = os.path.join(self.directory, "exit")
        # wait for room on a full disk: without this file nobody knows how the worker ended
        for _ in range(600):
            try:
                write_json(path, end | now)
                return
            except FileNotFoundError:
                return  # the job's directory was removed
            except OSError:
                time.sleep(1.0)


def main() -> None:
    directory = sys.argv[1]
    spec = json.loads(sys.stdin.buffer.read() or b"null")
    if spec is None:
        sys.exit(1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Keeper(directory, spec).run()
