"""The files of a job that workers keep at the control plane: what a pause saves, and checkpoints.

A worker whose node shares no directory with the control plane sends the file and, later, another worker reads it back.
Both use a connection of their own (`purpose: files`), with the job's secret like all others, and inside TLS between
machines. A worker that shares the directory writes the file itself and asks whether the control plane sees it.

    worker -> control   StoreFile, frames of bytes, an empty frame, FileEnd      control -> worker   FileAnswer
    worker -> control   FetchFile      control -> worker   FileAnswer, frames of bytes, an empty frame, FileEnd
    worker -> control   CheckFile      control -> worker   FileAnswer

A location is `job:NAME`, a file of the job, or a path that the user chose. The control plane opens a path only if the
job may read all that the control plane may read: otherwise a job could ask it for the files of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from shoal.wire.channel import AsyncChannel, Channel
from shoal.wire.messages import CheckFile, FetchFile, FileAnswer, FileEnd, Message, StoreFile, WireError
from shoal.wire.regular_file import open_regular

FILES = "files"
"""The purpose of these connections."""
OWN = "job:"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.pt")
FRAME_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
RETRY_S = 0.3


class NotKept(OSError):
    """The control plane could not keep or find the file. The message says why."""


def own(name: str) -> str:
    return OWN + name


def own_name(location: str) -> str | None:
    """The name of a file of the job; None for a path."""
    if not location.startswith(OWN):
        return None
    name = location.removeprefix(OWN)
    if not NAME.fullmatch(name):
        raise WireError(f"{name[:100]!r} is not a name of a file of a job")
    return name


def tail_of(file: IO[bytes]) -> tuple[int, str]:
    """The size of a file, and the SHA-256 of its end. A checkpoint ends with the checksums of all its parts."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return size, hashlib.sha256(file.read()).hexdigest()


class JobFiles:
    """The control plane's end for one job, whose files are in `directory`. The directory exists already."""

    def __init__(self, directory: Path, opens_paths: Callable[[], bool] = lambda: False) -> None:
        """`opens_paths`: whether the job may read all that this process may read."""
        self.directory, self._opens_paths = directory, opens_paths
        for left_over in directory.glob(".*.receiving"):  # the last control plane was killed
            left_over.unlink(missing_ok=True)

    async def serve(self, channel: AsyncChannel, may_read: Callable[[str], bool]) -> None:
        """Answer requests until the worker closes. `may_read`: whether workers may read a path that is not ours."""
        while True:
            request = await channel.receive()
            if isinstance(request, StoreFile):
                channel.send(await self._store(channel, request))
            elif isinstance(request, FetchFile):
                await self._fetch(channel, request, may_read)
            elif isinstance(request, CheckFile):
                channel.send(await asyncio.to_thread(self._check, request))
            else:
                raise WireError(f"a worker does not send {type(request).__name__} here")

    def _path(self, location: str) -> Path:
        name = own_name(location)
        return Path(location) if name is None else self.directory / name

    async def _store(self, channel: AsyncChannel, request: StoreFile) -> FileAnswer:
        name = own_name(request.location)
        if name is None:
            raise WireError(f"{request.location[:100]!r} is not a file of the job")
        incoming = _Incoming(self.directory, name)
        try:
            while await asyncio.to_thread(incoming.take, await channel.receive_frame()):
                pass
            end = await channel.receive()
            if not isinstance(end, FileEnd):
                raise WireError("expected FileEnd")
            return await asyncio.to_thread(incoming.complete, end)
        finally:
            incoming.discard()

    async def _fetch(
        self, channel: AsyncChannel, request: FetchFile, may_read: Callable[[str], bool]
    ) -> None:
        path = self._path(request.location)
        if own_name(request.location) is None and not may_read(request.location):
            channel.send(FileAnswer(False, "the job did not save its state there"))
            return
        try:
            file = await asyncio.to_thread(self._open, request.location)
        except OSError as error:
            channel.send(FileAnswer(False, f"{error.strerror}: {path}"))
            return
        with file:
            channel.send(FileAnswer(True))
            digest, size = hashlib.sha256(), 0
            while data := await asyncio.to_thread(file.read, FRAME_BYTES):
                digest.update(data)
                size += len(data)
                await channel.send_frame(data)
            await channel.send_frame(b"")
            channel.send(FileEnd(size, digest.hexdigest()))

    def _open(self, location: str) -> IO[bytes]:
        if own_name(location) is None and not self._opens_paths():
            raise PermissionError(errno.EACCES, "the control plane opens no paths for this job")
        return open_regular(self._path(location))

    def _check(self, request: CheckFile) -> FileAnswer:
        path = self._path(request.location)
        try:
            with self._open(request.location) as file:
                same = tail_of(file) == (request.size_bytes, request.tail_sha256)
        except OSError as error:
            return FileAnswer(False, f"{error.strerror}: {path}")
        return FileAnswer(same, "" if same else f"another file is at {path}")


class _Incoming:
    """A file that is being received. A failed write is reported at the end: the worker sends before it reads."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / name
        self._temporary = directory / f".{name}.{secrets.token_hex(4)}.receiving"
        self._digest, self._size = hashlib.sha256(), 0
        self._file: IO[bytes] | None = None
        self._failure: OSError | None = None

    def take(self, data: bytes) -> bool:
        """Write a frame. False: it was the last one."""
        try:
            if self._file is None and self._failure is None:
                opened = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                self._file = os.fdopen(opened, "wb", buffering=0)
            if self._file is not None:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failure = error
            self.discard()
        self._digest.update(data)
        self._size += len(data)
        return bool(data)

    def complete(self, end: FileEnd) -> FileAnswer:
        if (self._size, self._digest.hexdigest()) != (end.size_bytes, end.sha256):
            return FileAnswer(False, "not all of it arrived")
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                os.replace(self._temporary, self._path)
                sync_directory(self._path.parent)
                return FileAnswer(True)
            except OSError as error:
                self._failure = error
        why = "" if self._failure is None else self._failure.strerror
        return FileAnswer(False, f"{why}: {self._path.parent}")

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        with contextlib.suppress(OSError):
            self._temporary.unlink()


def sync_directory(directory: Path) -> None:
    """Make a rename in it survive a crash of the machine."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class FileClient:
    """The worker's end. Each call opens a connection. A control plane that cannot be reached raises an OSError."""

    def __init__(self, connect: Callable[[], Channel], patience_s: float = 0.0) -> None:
        """`patience_s`: how long `fetch` waits for a control plane that was killed."""
        self._connect, self._patience_s = connect, patience_s

    def store(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Send what `write` writes. Returns when the control plane has all of it on its disk."""
        with contextlib.closing(self._open()) as channel:
            channel.send(StoreFile(own(name)))
            sink = _Sink(channel)
            write(sink)  # type: ignore[arg-type]  # it is written to, and no more
            sink.flush()
            channel.send_frame(b"")
            channel.send(FileEnd(sink.size, sink.digest.hexdigest()))
            self._answer(channel, f"the control plane could not keep {name}")

    def fetch(self, location: str) -> IO[bytes]:
        """The file, in a temporary file without a name."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._fetch(location)
            except NotKept:
                raise
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)

    def _fetch(self, location: str) -> IO[bytes]:
        with contextlib.closing(self._open()) as channel, contextlib.ExitStack() as undo:
            channel.send(FetchFile(location))
            self._answer(channel, f"the control plane cannot read {location}")
            file = undo.enter_context(tempfile.TemporaryFile())
            digest, size = hashlib.sha256(), 0
            while data := channel.receive_frame():
                digest.update(data)
                size += _write_here(file, data)
            if self._receive(channel, FileEnd) != FileEnd(size, digest.hexdigest()):
                raise NotKept(f"{location} did not arrive completely")
            file.seek(0)
            undo.pop_all()
            return file

    def sees(self, location: str, size_bytes: int, tail_sha256: str) -> bool:
        """Whether the control plane sees this very file."""
        with contextlib.closing(self._open()) as channel:
            channel.send(CheckFile(location, size_bytes, tail_sha256))
            answer: FileAnswer = self._receive(channel, FileAnswer)
            return answer.ok

    def _open(self) -> Channel:
        try:
            return self._connect()
        except WireError as error:
            raise OSError(f"the control plane refuses this worker: {error}") from None

    def _answer(self, channel: Channel, what: str) -> None:
        answer = self._receive(channel, FileAnswer)
        if not answer.ok:
            raise NotKept(f"{what}: {answer.why}")

    def _receive(self, channel: Channel, kind: type[Any]) -> Any:
        try:
            message: Message = channel.receive()
        except WireError as error:
            raise OSError(f"the control plane's answer is not understood: {error}") from None
        if not isinstance(message, kind):
            raise OSError(f"the control plane sent {type(message).__name__} instead of {kind.__name__}")
        return message


def _write_here(file: IO[bytes], data: bytes) -> int:
    try:
        return file.write(data)
    except OSError as error:
        where = tempfile.gettempdir()
        raise NotKept(
            f"{error.strerror}: {where}; set TMPDIR to a directory with room for the state"
        ) from None


class _Sink(io.RawIOBase):
    """What is written to it is sent in frames."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._rest = channel, bytearray()
        self.digest, self.size = hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        for low in range(0, len(view), FRAME_BYTES):
            self._rest += view[low : low + FRAME_BYTES]
            if len(self._rest) >= FRAME_BYTES:
                self.flush()
        return len(view)

    def flush(self) -> None:
        if self._rest:
            data, self._rest = bytes(self._rest), bytearray()
            self.digest.update(data)
            self.size += len(data)
            self._channel.send_frame(data)
