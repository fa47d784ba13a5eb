"""Checkpoints that are whole or not there: written aside, synced, renamed."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Noting(io.BufferedWriter):
    """Remembers why it could not write: what torch makes of that says nothing of files and disks."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def write_atomically(path: str | Path, write: Callable[[io.BufferedIOBase], None]) -> None:
    """On any failure (a full disk, say) what was at `path` before is still there, and nothing else."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with Noting(io.FileIO(aside, "wb")) as file:
            try:
                write(file)
            except RuntimeError as error:
                raise file.failure or error from None
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself
        finally:
            os.close(directory)
