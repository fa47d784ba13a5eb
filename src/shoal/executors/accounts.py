"""Accounts of this machine: a process that runs as root runs each job under the account of its owner.

What the job may read and write is outside the server's home, which nobody else may enter. The base directory belongs
to root, who alone makes entries in it:

    BASE/KEY.job       the job's own directory (SHOAL_JOB_DIR), mode 0700, owned by the account
    BASE/KEY.secrets   a worker's secret files, removed when it has ended

Root writes only into directories that it still owns, and then gives them away: in a directory of the job, a link could
lead root to any file.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


class Private:
    """The files of one worker under an account."""

    def __init__(self, account: Account, directory: Path, worker: str, base: Path | None = None) -> None:
        """`directory` is the worker's, where its keeper keeps files that the job cannot reach."""
        self._account = account
        self._base = base or Path(os.environ.get("SHOAL_JOBS_DIR", BASE))
        job = worker.rpartition(".")[0] or worker
        self.job = self._base / f"{_key(str(directory.parent), job)}.job"
        self._secrets = self._base / f"{_key(str(directory))}.secrets"

    def make(self, secret_files: Mapping[str, str]) -> dict[str, str]:
        """Make the directories; return the variables that name them."""
        self._base.mkdir(parents=True, exist_ok=True, mode=0o711)
        if self._base.stat().st_uid != os.geteuid():
            raise OSError(0, f"{self._base} belongs to another account; remove it, or set SHOAL_JOBS_DIR")
        os.chmod(self._base, 0o711)
        if not self.job.exists():
            self.job.mkdir(mode=0o700)
            os.chown(self.job, self._account.uid, self._account.gid)
        elif self.job.is_symlink() or self.job.stat().st_uid != self._account.uid:
            raise OSError(0, f"{self.job} belongs to another account than {self._account.name!r}")
        return {"SHOAL_JOB_DIR": str(self.job)} | self._write(secret_files)

    def _write(self, files: Mapping[str, str]) -> dict[str, str]:
        self.remove_secrets()
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

    def copy_of(self, workdir: Path) -> Path:
        """The account's own copy of an uploaded working directory."""
        path = self._base / f"{_key(str(workdir), self._account.name)}.workdir"
        if not path.exists():
            making = path.with_suffix(f".{os.getpid()}")
            shutil.rmtree(making, ignore_errors=True)
            shutil.copytree(workdir, making, symlinks=True)
            os.chmod(making, 0o700)
            for at, directories, files in os.walk(making, topdown=False):
                for name in (*directories, *files):
                    os.lchown(os.path.join(at, name), self._account.uid, self._account.gid)
            os.chown(making, self._account.uid, self._account.gid)
            os.rename(making, path)
        return path

    def remove_secrets(self) -> None:
        remove_secrets(self._base, self._secrets.name)


def remove_secrets_of(directory: Path, base: Path | None = None) -> None:
    """Delete the secret files of the worker in this directory, if it had an account."""
    remove_secrets(base or Path(os.environ.get("SHOAL_JOBS_DIR", BASE)), f"{_key(str(directory))}.secrets")


def remove_secrets(base: Path, name: str) -> None:
    shutil.rmtree(base / name, ignore_errors=True)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
