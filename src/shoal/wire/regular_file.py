"""Reads files that a job may have replaced: it may run under the account of the process that reads them."""

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
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """At most the first `most_bytes` of a regular file."""
    with open_regular(path) as file:
        return file.read(most_bytes)
