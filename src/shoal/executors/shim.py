"""The keeper of one worker: a small process that outlives the control plane.

It starts the command, writes its output to capped log files with the time of each line, ends it when told to,
and leaves on disk how it ended. So the control plane may die and come back: the worker runs on, nothing it
printed is lost, and its exit code is known. It uses the standard library only, and is run as

    python -I -S shim.py DIRECTORY LOCK_FD < specification (JSON: command, workdir, env, grace_s, ...)

In DIRECTORY: `started` (JSON, when the command runs), `exit` (JSON, when all is over), `log.OFFSET` (output; each
file is named for the offset of its first byte in all that was written).
Signals to it: TERM end with grace, QUIT end at once, USR1 stand still, USR2 go on.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
AFTERMATH_S = 1.0
"""Between the end of the command and the killing of what it left behind."""
LONGEST_LINE = 16 * 1024


def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_time(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] == b"Z" else int(fields[19])


def boot_id():
    """Names the time since the machine started: `time.monotonic()` of two processes compares only within it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def write_json(path, value):
    temporary = f"{path}.new"
    with open(temporary, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def descendants():
    """All processes below this one. As their reaper, this process inherits those whose parents ended."""
    children = {}
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
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def tell(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


#: A time and a space before each line, and the end of the line.
STAMP_BYTES = 29


class Log:
    """Lines with their time, in files of at most `file_bytes`; the newest `files` are kept."""

    def __init__(self, directory, file_bytes, files):
        self.directory, self.file_bytes, self.files = directory, file_bytes, files
        self.offset, self.begin, self.lost = 0, 0, 0
        # The machine's clock is read once: a clock that is set must not change the order of lines.
        self.wall_offset = time.time() - time.monotonic()
        self.file = open(os.path.join(directory, "log.0"), "ab", buffering=0)  # noqa: SIM115
        self.rest = b""

    def take(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            lines.append(self.rest)
            self.rest = b""
        self.write(lines)

    def end(self):
        if self.rest:
            self.write([self.rest])
        self.rest = b""

    def write(self, lines):
        """Write lines, beginning a new file whenever one is full: much output may come at once."""
        part, size = [], 0
        for line in lines:
            part.append(line)
            size += len(line) + STAMP_BYTES
            if size >= self.file_bytes - (self.offset - self.begin):
                self.append(part)
                part, size = [], 0
        if part:
            self.append(part)

    def append(self, lines):
        now = self.wall_offset + time.monotonic()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z "
        out = bytearray()
        for line in lines:
            # A line that was drawn over with carriage returns is kept as it last stood.
            shown = next((part for part in reversed(line.split(b"\r")) if part), b"")
            while True:
                out += stamp.encode() + shown[:LONGEST_LINE] + b"\n"
                shown = shown[LONGEST_LINE:]
                if not shown:
                    break
        try:
            if self.lost:
                out = f"{stamp}[{self.lost} bytes of output were lost: the disk was full]\n".encode() + out
            written = self.file.write(out)
            self.offset += written
            self.lost = len(out) - written
        except OSError:
            self.lost += len(out)
        if self.offset - self.begin >= self.file_bytes:
            self.rotate()

    def rotate(self):
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
    def __init__(self, directory, spec):
        self.directory, self.spec = directory, spec
        self.log = Log(directory, spec["log_file_bytes"], spec["log_files"])
        self.child = None
        self.status = None  # of the command, once it has ended
        self.kill_at = None
        self.told = False
        self.asked = []

    def run(self):
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda n, _: self.asked.append(n))
        signal.signal(signal.SIGCHLD, lambda n, f: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            output = self.begin()
        except OSError as error:
            return self.could_not(error)
        selector = selectors.DefaultSelector()
        selector.register(wake_r, selectors.EVENT_READ)
        selector.register(output, selectors.EVENT_READ)
        is_open = True
        while True:
            for key, _ in selector.select(self.patience()):
                if key.fileobj is wake_r or key.fd == wake_r:
                    os.read(wake_r, 4096)
                else:
                    data = os.read(output, 65536)
                    self.log.take(data)
                    if not data:
                        selector.unregister(output)
                        is_open = False
            self.obey()
            if self.reap():
                break
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                tell(descendants(), signal.SIGKILL)
        if is_open:
            self.drain(output)
        self.log.end()
        return self.over()

    def begin(self):
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        unblocked = {signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP}

        def prepare():
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in unblocked:
                signal.signal(number, signal.SIG_DFL)

        self.child = subprocess.Popen(
            self.spec["command"],
            cwd=self.spec["workdir"],
            env=self.spec["env"],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
            preexec_fn=prepare,
        )
        os.close(write)
        self.say_started(self.child.pid)
        return read

    def say_started(self, pid):
        write_json(
            os.path.join(self.directory, "started"),
            {
                "pid": pid,
                "start_time": start_time(pid),
                "keeper_pid": os.getpid(),
                "keeper_start_time": start_time(os.getpid()),
            },
        )

    def could_not(self, error):
        missing = isinstance(error, FileNotFoundError)
        what = error.filename if error.filename else self.spec["command"][0]
        why = f"cannot start {what!r}: {error.strerror or error}"
        self.log.write([why.encode(errors="replace")])
        self.finish(127 if missing else 126, None, why)

    def patience(self):
        if self.kill_at is None:
            return None if self.status is None else 0.1
        return min(max(self.kill_at - time.monotonic(), 0.02), 0.1 if self.status is not None else 3600.0)

    def obey(self):
        asked, self.asked = self.asked, []
        for number in asked:
            if number == signal.SIGUSR1:
                tell(descendants(), signal.SIGSTOP)
            elif number == signal.SIGUSR2:
                tell(descendants(), signal.SIGCONT)
            else:
                grace_s = self.spec["grace_s"] if number == signal.SIGTERM else 0.0
                deadline = time.monotonic() + grace_s
                self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
                self.told = self.told or self.status is None
                # Only the command itself is asked: it may need its children to save what it wants to keep.
                tell([self.child.pid] if grace_s and self.status is None else descendants(),
                     signal.SIGTERM if grace_s else signal.SIGKILL)  # fmt: skip
                tell(descendants(), signal.SIGCONT)

    def reap(self):
        """Whether no process is left below. A list of processes may miss one that moves; a reaper's kernel does not."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.child.pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.child.returncode = self.status
                tell(descendants(), signal.SIGTERM)
                if self.kill_at is None:
                    self.kill_at = time.monotonic() + AFTERMATH_S

    def drain(self, output):
        while True:
            try:
                data = os.read(output, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            self.log.take(data)

    def over(self):
        code, number = (self.status, None) if self.status >= 0 else (None, -self.status)
        name = None
        if number is not None:
            try:
                name = signal.Signals(number).name
            except ValueError:
                name = f"SIG{number}"
        self.finish(code, name, "it was told to end" if self.told else "")

    def finish(self, code, name, why):
        exit_ = {"code": code, "signal": name, "why": why, "told": self.told}
        exit_ |= {"steady_s": time.monotonic(), "boot": boot_id()}
        path = os.path.join(self.directory, "exit")
        for _ in range(600):  # a full disk may get room again; without this file no one would know
            try:
                return write_json(path, exit_)
            except FileNotFoundError:
                return None  # the job's directory was removed, and with it whoever would ask
            except OSError:
                time.sleep(1.0)
        return None


def main():
    directory = sys.argv[1]
    spec = json.loads(sys.stdin.buffer.read() or b"null")
    if spec is None:
        sys.exit(1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Keeper(directory, spec).run()


if __name__ == "__main__":
    main()
