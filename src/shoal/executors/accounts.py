"""Accounts of this machine: a process that runs as root runs each job under the account of its owner.

What the job may read and write is outside the server's home, which nobody else may enter. The base directory belongs
to root, who alone makes entries in it and in the directories with a key:

    BASE/jobs-KEY/JOB     the job's own directory (SHOAL_JOB_DIR), mode 0700, owned by the account
    BASE/KEY.secrets      a worker's secret files, removed when it has ended
    BASE/KEY.go           appears when a worker may use its GPU (SHOAL_GO), removed when it has ended
    BASE/KEY.control      the address of a control plane that had to change it (SHOAL_CONTROL_FILE), which is no secret
    BASE/trees-KEY        uploaded working directories (`agents.trees`)

Root writes only into directories that it still owns, and then gives them away: in a directory of the job, a link could
lead root to any file. For the same reason root never reads what belongs to an account.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.executors.base import OwnAccount, RunAs

BASE = "/var/lib/shoal-jobs"


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    def env(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    def ids(self) -> dict[str, object]:
        """For `keeper.confine`."""
        return {"uid": self.uid, "gid": self.gid, "groups": list(self.groups)}


def find_account(name: str) -> Account:
    """The account with this name; raises OSError with a sentence if it cannot be used here."""
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise OSError(0, f"there is no account {name!r} on this machine") from None
    if os.geteuid() != 0 and found.pw_uid != os.geteuid():
        raise OSError(0, f"it runs under another account than {name!r}, and only root can change that")
    groups = tuple(os.getgrouplist(name, found.pw_gid))
    return Account(name, found.pw_uid, found.pw_gid, groups, found.pw_dir, found.pw_shell)


def account_for(run_as: RunAs, *, allow_root: bool = False) -> Account | None:
    """The account to change to; None: that of this process. Raises OSError with a sentence if the job may not run.

    `allow_root`: this process may run jobs as root whose owners have no account.
    """
    if isinstance(run_as, OwnAccount):
        if os.geteuid() == 0 and not run_as.may_be_root and not allow_root:
            raise OSError(
                0,
                "its owner has no account, and here it would run as root; an admin gives the owner an account: "
                "shoal user set USER --account NAME (or starts the agent with --allow-root)",
            )
        return None
    found = find_account(run_as.name)
    return None if found.uid == os.geteuid() else found


def base_directory() -> Path:
    """Where the files of jobs under accounts are. SHOAL_JOBS_DIR changes it."""
    return Path(os.environ.get("SHOAL_JOBS_DIR", BASE))


def make_base() -> Path:
    """The base directory, which belongs to this process. Others may pass through it."""
    base = base_directory()
    base.mkdir(parents=True, exist_ok=True, mode=0o711)
    if base.stat().st_uid != os.geteuid():
        raise OSError(0, f"{base} belongs to another account; remove it, or set SHOAL_JOBS_DIR")
    os.chmod(base, 0o711)
    return base


class Private:
    """The files of one worker under an account."""

    def __init__(self, account: Account, directory: Path, worker: str) -> None:
        """`directory` is the worker's, where its keeper keeps files that the job cannot reach."""
        self._account, self._base = account, make_base()
        self._job = _jobs(directory.parent) / (worker.rpartition(".")[0] or worker)
        self._secrets = self._base / f"{_key(str(directory))}.secrets"

    def job_directory(self) -> Path:
        """The job's own directory on this machine, which its later workers find again."""
        path = self._job
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o711)
        if not path.exists():
            path.mkdir(mode=0o700)
            os.chown(path, self._account.uid, self._account.gid)
        elif path.is_symlink() or path.stat().st_uid != self._account.uid:
            raise OSError(0, f"{path} belongs to another account than {self._account.name!r}")
        return path

    def write_secrets(self, files: Mapping[str, str]) -> dict[str, str]:
        """Write files that only the account can read; return the variables that name them."""
        shutil.rmtree(self._secrets, ignore_errors=True)
        if not files:
            return {}
        self._secrets.mkdir(mode=0o700)
        made = {}
        for name, text in files.items():
            path = self._secrets / name.lower()
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
                os.fchown(file.fileno(), self._account.uid, self._account.gid)
            made[name] = str(path)
        os.chown(self._secrets, self._account.uid, self._account.gid)
        return made


def go_file(directory: Path) -> Path:
    """The file that tells the worker in this directory, which runs under an account, that it may use its GPU."""
    return base_directory() / f"{_key(str(directory))}.go"


def address_file(home: Path) -> Path:
    """Where workers under accounts find the address of the control plane with this home, if it had to change it."""
    return base_directory() / f"{_key(str(home))}.control"


def remove_files_of(directory: Path) -> None:
    """Delete the files of the worker in this directory that are outside it, if it had an account."""
    shutil.rmtree(base_directory() / f"{_key(str(directory))}.secrets", ignore_errors=True)
    go_file(directory).unlink(missing_ok=True)


def job_directories(workers: Path) -> list[Path]:
    """The directories of all jobs whose workers had theirs in `workers`. Their names are those of the jobs."""
    return sorted(_jobs(workers).glob("*"))


def _jobs(workers: Path) -> Path:
    """Servers and agents of one machine share the base directory, but not the numbers of jobs."""
    return base_directory() / f"jobs-{_key(str(workers))}"


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
