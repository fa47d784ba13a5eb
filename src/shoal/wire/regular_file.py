"""Reads and writes files where a job may have laid something else: it may run under the account of this process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

#: More than any file that a keeper writes.
MOST_BYTES = 64 * 1024 * 1024


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file: not a link to the file of somebody else, nor a pipe, which would make the reader wait."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """At most the first `most_bytes` of a regular file."""
    with open_regular(path) as file:
        return file.read(most_bytes)


def append_regular(path: Path, data: bytes) -> None:
    """Append to a regular file, which is made if there is nothing."""
    with os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(data)


def write_new(path: Path, text: str) -> None:
    """Write a new file in place of whatever is there."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)


def _open(path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd
