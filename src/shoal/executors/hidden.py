"""Hides a directory from a process without root: a user and a mount namespace of its own. Standard library only.

In it, the directory is empty but for the paths that are given back. Of those, some can only be read, and beside each of
these there is nothing else: the process cannot change them, replace them, or lay something where a later one will be.
The process keeps its account and has no rights beyond it: it cannot undo the mounts, and it cannot read the memory, the
variables or the open files of processes outside, which the kernel allows only within one user namespace. It can still
signal processes of its account, and read and write the account's files elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
CAPABILITY_VERSION_3, PR_SET_DUMPABLE = 0x20080522, 4
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000


def plan(directory: os.PathLike[str], needed: Sequence[str], only_read: Sequence[str] = ()) -> dict[str, Any]:
    """What `hide` gets: the directory, and those of the paths that are in it."""
    real = os.path.realpath(directory)
    read_only = _inside(real, only_read)
    given_back = _inside(real, needed) - read_only
    # A path that is in another comes after it.
    return {"hidden": real, "given_back": sorted(given_back), "read_only": sorted(read_only)}


def _inside(directory: str, paths: Sequence[str]) -> set[str]:
    found = set()
    for path in paths:
        # A link in the directory is replaced by what it leads to. A path may also lead into it from outside.
        for inside in (
            os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)),
            os.path.realpath(path),
        ):
            if inside.startswith(directory + os.sep) and os.path.isdir(inside):
                found.add(inside)
    return found


def hide(directory: str, give_back: Sequence[str], read_only: Sequence[str] = ()) -> None:
    """Hide the directory from this process, which has one thread, and its children. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        words = [word.encode() for word in (source, target, kind)]
        if libc.mount(*words, ctypes.c_ulong(flags), options.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)

    def empty(path: str) -> None:
        mount("none", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=700")

    kept = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*give_back, *read_only)}
    empty(directory)
    for path in give_back:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{kept[path]}", path, "none", MS_BIND | MS_REC)
    for parent in {os.path.dirname(path): None for path in read_only}:
        os.makedirs(parent, exist_ok=True)
        empty(parent)
    for path in read_only:
        os.mkdir(path)
        mount(f"/proc/self/fd/{kept[path]}", path, "none", MS_BIND)
        as_before = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # nobody may drop these here
        mount("none", path, "none", MS_REMOUNT | MS_BIND | MS_RDONLY | as_before)
    for fd in kept.values():
        os.close(fd)
    # The first process of a namespace may do everything in it. A new program would lose that; a fork must give it up.
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as before: /proc/self is its own


@functools.cache
def why_not() -> str:
    """Why no directory can be hidden here; empty: it can. Tried in another process, which it changes for good."""
    tried = subprocess.run(
        [sys.executable, "-I", "-S", __file__], capture_output=True, text=True, cwd="/", check=False
    )
    return "" if tried.returncode == 0 else tried.stderr.strip().rpartition("\n")[2] or "it failed"


if __name__ == "__main__":
    hide("/tmp", [])
