"""Workers that run in a home but are not on its record, because the record is an older backup: found and ended.

A keeper holds the lock of its worker's directory open for as long as it lives. So the open files of this machine's
processes show which workers of a home run, whatever the record says.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Container
from pathlib import Path

from shoal.executors.accounts import remove_files_of
from shoal.executors.cgroups import Cgroups
from shoal.executors.guard import Guarded
from shoal.executors.keeper_files import grace_of, open_files
from shoal.executors.secret_files import SecretFiles

LOOK_S = 0.05


def kept_workers(jobs: Path) -> dict[Path, int]:
    """The directories `jobs/JOB/workers/WORKER` whose keeper lives, with the keeper's pid."""
    root = os.path.realpath(jobs) + os.sep
    found: dict[Path, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            for target in open_files(name):
                directory, file = os.path.split(target)
                if file == "lock" and directory.startswith(root):
                    found[Path(directory)] = int(name)
    return found


async def end_unknown_workers(jobs: Path, known: Container[str]) -> list[str]:
    """End the workers of this home that are not `known`, and wait until nothing of them is left. Return their ids."""
    unknown = {path: pid for path, pid in kept_workers(jobs).items() if path.name not in known}
    await asyncio.gather(*(_end(path, pid) for path, pid in unknown.items()))
    return sorted(path.name for path in unknown)


async def _end(directory: Path, pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if directory not in map(Path, map(os.path.dirname, open_files(pid))):
            return  # another process has got the pid
        groups = Cgroups.find()
        group = None if groups is None else groups.of(directory)
        kept = Guarded(directory, pid, pidfd, grace_of(directory), group)
        kept.look()  # notes the processes below it
        kept.end()
        while not select.select([pidfd], [], [], 0)[0]:
            await asyncio.sleep(LOOK_S)
            kept.look()
    finally:
        os.close(pidfd)
    kept.clean_up()
    while not kept.is_clean():
        await asyncio.sleep(LOOK_S)
        kept.clean_up()
    SecretFiles(directory).remove()
    remove_files_of(directory)
