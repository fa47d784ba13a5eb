"""A control group (cgroup v2) per worker. It holds every process that the worker starts, whatever that process does.

A process cannot leave its group without the right to write to another one, and `cgroup.kill` ends all processes of a
group at once. Where no cgroup v2 is mounted, or this account may not make groups, there are none: keepers then find
the processes of a worker by walking the process tree.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path


class Cgroups:
    """Makes groups below `root`, a directory of the cgroup v2 that is mounted at `mount`."""

    def __init__(self, root: Path, mount: Path | None = None) -> None:
        self._root, self._mount = root, mount or root

    @classmethod
    def find(cls) -> Cgroups | None:
        """Groups below this process's own one, if it may make any."""
        own = _own_group()
        if own is None:
            return None
        root, mount = own
        probe = root / f"shoal-probe-{secrets.token_hex(4)}"
        try:
            probe.mkdir()
        except OSError:
            return None
        usable = (probe / "cgroup.kill").exists()
        remove(probe)
        return cls(root, mount) if usable else None

    def of(self, directory: Path) -> Path | None:
        """The group of the worker in this directory, if it has one. A job cannot change which one it is.

        An earlier server may have made it below another group, that of another login session.
        """
        name = _name(directory)
        here = self._root / name
        return here if here.is_dir() else next(self._mount.rglob(name), None)

    def make(self, directory: Path) -> Path:
        group = self._root / _name(directory)
        group.mkdir(exist_ok=True)
        return group


def _name(directory: Path) -> str:
    return f"shoal-{hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]}"


def kill(group: Path) -> None:
    """Kill all processes of the group."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")


def is_empty(group: Path) -> bool:
    """Whether no process is left in the group."""
    try:
        return "populated 0" in (group / "cgroup.events").read_text()
    except OSError:  # it does not exist
        return True


def remove(group: Path) -> None:
    with contextlib.suppress(OSError):
        group.rmdir()


def _own_group() -> tuple[Path, Path] | None:
    """The group of this process, as a directory, and where the cgroup v2 is mounted."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in groups if line.startswith("0::")), None)
    for fields in mounts:
        if path is not None and fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4]) / path.lstrip("/"), Path(fields[4])
    return None
