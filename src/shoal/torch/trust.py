"""Whether a checkpoint may be read. It contains objects of the script, and reading them can run code.

So it is read only if nobody but this account and root could have written it. `torch.load` reads the tensors with
`weights_only=True`; the objects are read after version and signature have been compared.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def check(path: Path, fd: int) -> None:
    """Raise PermissionError if another account could have written the open file `fd` at `path`."""
    why = _why_not(os.fstat(fd), os.stat(path.parent))
    if why is not None:
        raise PermissionError(
            1, f"another account could have changed it ({why}), and reading it could run code", str(path)
        )


def _why_not(file: os.stat_result, directory: os.stat_result) -> str | None:
    if not _is_ours(file):
        return f"it belongs to {_name(file.st_uid)}"
    if _others_write(file):
        return "others may write to it; chmod go-w"
    sticky = bool(directory.st_mode & stat.S_ISVTX)  # only its owner can replace a file there
    if not _is_ours(directory) and not sticky:
        return f"its directory belongs to {_name(directory.st_uid)}"
    if _others_write(directory) and not sticky:
        return "others may write to its directory; chmod go-w"
    return None


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0)


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private(found.st_gid)


def _is_private(gid: int) -> bool:
    """Whether only this account is in the group."""
    try:
        me = pwd.getpwuid(os.geteuid())
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        return False
    others = [entry for entry in pwd.getpwall() if entry.pw_gid == gid and entry.pw_uid != me.pw_uid]
    return me.pw_gid == gid and not others and set(members) <= {me.pw_name}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
