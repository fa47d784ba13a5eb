"""Where a job's state is saved and read: in a directory that this node shares with the control plane, or through it.

The state is safe when the control plane has seen the complete file. Nothing is left on a disk that only this node has.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from shoal.torch import trust
from shoal.wire.job_files import FileClient, own, own_name, sync_directory, tail_of

Write = Callable[[io.BufferedIOBase], None]
COPY = "checkpoint.pt"
BUFFER_BYTES = 1 << 20


class StateFiles:
    """`directory` has the job's own files and is shared with the control plane; None: this node shares none.

    Without `client` the script runs outside Shoal: all locations are paths, and nobody else has to see them.
    """

    def __init__(
        self,
        client: FileClient | None = None,
        directory: str | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        self._client, self._directory, self._note = client, directory, note

    def save(self, location: str, write: Write) -> str:
        """Save what `write` writes. Returns its location once it is safe. Raises OSError if it is not."""
        name = own_name(location)
        path = self._path(location, name)
        if path is not None:
            try:
                size_bytes, tail = write_atomically(path, write)
                if self._client is None or self._client.sees(
                    location if name else str(path), size_bytes, tail
                ):
                    return location if name else str(path)
            except OSError as error:
                if name is None or self._client is None:
                    raise
                self._note(f"cannot write to {path}: {error}; sending it to the control plane")
        assert self._client is not None, location
        self._client.store(name or COPY, lambda file: _write_buffered(file, write))
        if name is None:
            self._note(
                f"the control plane does not see {path}, so the job keeps a copy to restart from. "
                "job.checkpoint() without a path writes the copy alone"
            )
        return own(name or COPY)

    @contextmanager
    def open(self, location: str) -> Iterator[IO[bytes]]:
        """Read a file that was saved, by whichever worker."""
        name = own_name(location)
        path = self._path(location, name)
        file: IO[bytes] | None = None
        if path is not None:
            try:
                file = path.open("rb")
                trust.check(path, file.fileno())
            except FileNotFoundError:
                if self._client is None:
                    raise
        if file is None:
            assert self._client is not None, location
            file = self._client.fetch(location)
        with file:
            yield file

    def _path(self, location: str, name: str | None) -> Path | None:
        if name is None:
            return Path(os.path.abspath(location))
        return Path(self._directory, name) if self._directory is not None else None


class _FailureWriter(io.BufferedWriter):
    """Keeps the error of a failed write: the one that torch raises instead does not mention files or disks."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def _write_buffered(raw: Any, write: Write) -> None:
    file = _FailureWriter(raw, BUFFER_BYTES)
    try:
        write(file)
        file.flush()
    except RuntimeError as error:
        raise file.failure or error from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            file.detach()


def write_atomically(path: str | Path, write: Write) -> tuple[int, str]:
    """On any failure (a full disk, for example) the former file at `path` remains, and nothing else.

    The directory must exist: one that is made here could hide that a shared file system is not mounted. Returns the
    size of the file and the SHA-256 of its end.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "there is no such directory; make it first", str(path.parent))
    try:
        with io.FileIO(temporary, "wb+") as file:
            _write_buffered(file, write)
            os.fsync(file.fileno())
            found = tail_of(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):
        sync_directory(path.parent)
    return found
