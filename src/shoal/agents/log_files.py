"""The output of workers on its way: read on the node, appended to a copy at the control plane."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shoal.executors.local import LOG_FILE_BYTES, LOG_FILES
from shoal.executors.logs import segments
from shoal.wire.regular_file import append_regular, open_regular


def read_output(directory: Path, begin: int, max_bytes: int) -> tuple[int, bytes]:
    """Read whole lines from `begin` on, and where they begin: later than `begin` if output was rotated away.

    Nothing that is on disk is passed over. `max_bytes` must have room for any line that a keeper writes; a line that is
    longer, or that has no end although another file follows, is returned in parts.
    """
    found = segments(directory)
    for index, (start, path) in enumerate(found):
        try:
            with open_regular(path) as file:
                position = max(begin, start)
                file.seek(position - start)
                data = file.read(max_bytes)
        except OSError:  # rotated away meanwhile
            continue
        if whole := data[: data.rfind(b"\n") + 1]:
            return position, whole
        is_last = index == len(found) - 1
        if data and (len(data) == max_bytes or not is_last):
            return position, data
    return begin, b""


class LogCopy:
    """Copies of workers' output, in the file format of the keepers and with their limits."""

    def __init__(self, file_bytes: int = LOG_FILE_BYTES, files: int = LOG_FILES) -> None:
        self._file_bytes, self._files = file_bytes, files

    def append(self, directory: Path, position: int, data: bytes) -> None:
        """Append whole lines at `position`, the end of the copy or later."""
        found = segments(directory)
        if found:
            start, path = found[-1]
            size = path.lstat().st_size
        if not found or start + size != position or size >= self._file_bytes:
            path = directory / f"log.{position}"
            for _, old in found[: len(found) + 1 - self._files]:
                with contextlib.suppress(OSError):
                    old.unlink()
        append_regular(path, data)
