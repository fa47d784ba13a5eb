"""The home directory: all files of one server. Several servers can run side by side, each with its own home."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.wire.atomic_file import write_atomically

FORMAT = 1
"""Version of the layout of a home. A server refuses a home with a higher version."""


class HomeInUse(ShoalError):
    """Another server runs on this home."""

    exit_code = 5


class MachinesLeft(ShoalError):
    """The server has ended, and the engine still has machines of it."""

    exit_code = 1


class NewerHome(ShoalError):
    """A newer version of Shoal wrote this home."""

    exit_code = 5


def default_home() -> Path:
    """`$SHOAL_HOME`, else `shoal` in the XDG state directory."""
    if given := os.environ.get("SHOAL_HOME"):
        return Path(given).absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "shoal"


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if there is none. Pid and start time identify a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] == b"Z" else int(fields[19])


@dataclass(frozen=True, slots=True)
class Running:
    """The server of a home, from `server.json`."""

    pid: int
    start_time: int
    address: str
    version: str

    @classmethod
    def read(cls, path: Path) -> Running:
        found = json.loads(path.read_text())
        return cls(
            pid=int(found["pid"]),
            start_time=int(found["start_time"]),
            address=str(found["address"]),
            version=str(found["version"]),
        )

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.start_time


class Home:
    """The paths of one home, and its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "shoal.db"
        self.admin_token = path / "admin.token"
        self.server = path / "server.json"
        self.jobs = path / "jobs"
        self.workdirs = path / "workdirs"
        #: Where jobs that begin keep their state, apart from the home. None: in the home.
        self.shared: Path | None = None
        self._lock_fd: int | None = None

    def job(self, job_id: int) -> Path:
        return self.jobs / str(job_id)

    @property
    def states(self) -> Path:
        """Of the jobs that begin now: machines that share this directory write their state there."""
        return self.shared or self.jobs

    def new_state(self, job_id: int) -> Path | None:
        """Make a directory for the state of a job that begins: what a pause saves, and checkpoints. None: its own."""
        if self.shared is None:
            return None
        # Not the number alone: after a restored backup, it may be that of another job.
        directory = self.shared / f"{job_id}-{secrets.token_hex(4)}"
        directory.mkdir(mode=0o700)
        return directory

    def linked_state(self, job_id: int) -> Path | None:
        """The same of a job that began under an earlier version, which kept it as a link.

        The job can write there: only what a server may have made is followed.
        """
        try:
            found = Path(os.readlink(self.job(job_id) / "state"))
        except OSError:
            return None
        is_ours = found.parent == self.shared and re.fullmatch(rf"{job_id}-[0-9a-f]{{8}}", found.name)
        return found if is_ours and not found.is_symlink() else None

    def make(self) -> None:
        """Make the home if it does not exist. Nobody else may own or enter it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._close_to_others()
        except OSError as error:
            raise self._unusable(error) from None

    def take(self) -> None:
        """Make the home if it does not exist, and lock it until this process ends."""
        self.make()
        try:
            self.jobs.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise self._unusable(error) from None
        fd = os.open(self.path / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            found = self.running()
            by = f" by process {found.pid} at {found.address}" if found else ""
            raise HomeInUse(f"{self.path} is in use{by}; stop that server, or give another --home") from None
        self._lock_fd = fd
        self._check_format()

    def _unusable(self, error: OSError) -> ShoalError:
        why = (error.strerror or str(error)).lower()
        return ShoalError(f"cannot use {self.path} as home: {why}; choose another --home")

    def keep_states_in(self, directory: Path) -> None:
        """Jobs that begin keep their state there. Nobody else may own or enter it."""
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            found = directory.stat()
            if found.st_uid != os.geteuid():
                raise PermissionError(1, f"it belongs to user id {found.st_uid}")
            directory.chmod(0o700)
        except OSError as error:
            raise ShoalError(
                f"cannot keep the state of jobs in {directory}: {error.strerror}; mount it, give another --shared, or "
                "`--shared none`"
            ) from None
        self.shared = directory

    def note_not_returned(self, why: str) -> None:
        """Remember for `shoal down` why machines were left with the engine. Empty: none were."""
        if why:
            write_atomically(self.path / "not-returned", why + "\n")
        else:
            (self.path / "not-returned").unlink(missing_ok=True)

    def not_returned(self) -> str:
        with contextlib.suppress(OSError):
            return (self.path / "not-returned").read_text().strip()
        return ""

    def _close_to_others(self) -> None:
        """Nobody else may own or enter the home: it contains tokens, secrets and the store."""
        found = self.path.stat()
        if found.st_uid != os.geteuid():
            raise ShoalError(
                f"{self.path} belongs to user id {found.st_uid}, who could replace the server's files; "
                "choose another --home, or change its owner"
            )
        if found.st_mode & 0o077:
            self.path.chmod(found.st_mode & 0o700)

    def forget_secrets(self, job_id: int) -> None:
        """Delete what only a running job needs: its secrets and the key of its workers' connections."""
        for name in ("secrets.json", "secret"):
            with contextlib.suppress(OSError):
                (self.job(job_id) / name).unlink()

    def _check_format(self) -> None:
        mark = self.path / "format"
        if mark.exists():
            text = mark.read_text().strip()
            if not text.isdigit() or int(text) > FORMAT:
                raise NewerHome(
                    f"{self.path} has format {text[:20]!r} and this version reads up to {FORMAT}; "
                    f"upgrade shoal, or give another --home"
                )
        else:
            write_atomically(mark, f"{FORMAT}\n")

    def announce(self, address: str, version: str) -> None:
        """Write the address at which the server listens."""
        pid = os.getpid()
        body = {"pid": pid, "start_time": start_time(pid), "address": address, "version": version}
        write_atomically(self.server, json.dumps(body) + "\n")

    def running(self) -> Running | None:
        """The server that runs on this home, if any."""
        try:
            found = Running.read(self.server)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found.alive else None

    @property
    def is_held(self) -> bool:
        """Whether the directory is still the locked one. It may have been removed and even made again."""
        try:
            return self._lock_fd is not None and os.path.samestat(
                os.fstat(self._lock_fd), os.stat(self.path / "server.lock")
            )
        except OSError:
            return False

    def release(self) -> None:
        if self.is_held:
            with contextlib.suppress(OSError):
                self.server.unlink()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
