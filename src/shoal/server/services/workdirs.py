"""Uploaded working directories: one archive for each content, of the user who uploaded it.

An archive stays while an unfinished job uses it, and for an hour after it was uploaded or asked for. A user can run a
job only from an archive of their own: a content's name alone gives nobody another user's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from pathlib import Path
from typing import IO

from shoal.core.words import data_size
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.errors import Busy, Conflict, Invalid, NotFound
from shoal.server.store.store import StoreFull

KEEP_S = 3600.0
TIDY_S = 600.0
#: What one user may keep here, as a multiple of the limit of one upload.
USER_ARCHIVES = 20
MOST_AT_ONCE = 8
#: An upload of which nothing arrives for so long is given up.
SILENCE_S = 60.0
WRITE_BYTES = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".tar"

Used = Callable[[], Collection[tuple[str, str]]]


def uploads_in_use(jobs: Iterable[LiveJob]) -> set[tuple[str, str]]:
    return {(job.user, job.spec["tree"]) for job in jobs if job.spec.get("tree")}


class Workdirs:
    def __init__(self, directory: Path, limit_bytes: int, used: Used) -> None:
        """`used`: user and content of each directory that an unfinished job needs."""
        self.directory, self.limit_bytes, self._used = directory, limit_bytes, used
        self._receiving = 0

    def path(self, user: str, digest: str) -> Path:
        return self.directory / user / f"{digest}{SUFFIX}"

    def find(self, digest: str) -> Path | None:
        """An archive of this content, whoever uploaded it: for agents, which serve all users."""
        if not DIGEST.fullmatch(digest):
            return None
        return next(self.directory.glob(f"*/{digest}{SUFFIX}"), None)

    def size_bytes(self, user: str, digest: str) -> int:
        """The size of the user's archive, which is kept for another hour. Raises NotFound."""
        path = self.path(user, digest)
        try:
            os.utime(path)
            return path.stat().st_size
        except OSError:
            raise NotFound(
                "this directory was not uploaded, or no job used it for an hour", "upload it again"
            ) from None

    async def receive(self, user: str, digest: str, body: AsyncIterator[bytes]) -> int:
        """Store an archive and return its size. Nothing stays of one that is incomplete, too large or not as named."""
        with contextlib.suppress(NotFound):
            return self.size_bytes(user, digest)
        if self._receiving >= MOST_AT_ONCE:
            raise Busy("other directories are being uploaded", "try again in a moment")
        self._receiving += 1
        try:
            await self.tidy()
            self._check_room(user)
            return await self._receive(self.path(user, digest), digest, body)
        except OSError as error:
            raise StoreFull(
                f"cannot store the directory: {error.strerror or error}; nothing was kept"
            ) from None
        finally:
            self._receiving -= 1

    async def _receive(self, path: Path, digest: str, body: AsyncIterator[bytes]) -> int:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        incoming = _Incoming(temporary)
        try:
            async for data in _timely(body):
                if incoming.size_bytes + len(data) > self.limit_bytes:
                    raise Invalid(f"the directory has more than {data_size(self.limit_bytes)}", "body")
                if incoming.add(data):
                    await asyncio.to_thread(incoming.write)
            if await asyncio.to_thread(incoming.complete) != digest:
                raise Invalid("the directory did not arrive as it was sent: upload it again", "body")
            os.replace(temporary, path)
            return incoming.size_bytes
        finally:
            incoming.discard()

    def _check_room(self, user: str) -> None:
        total = sum(p.stat().st_size for p in self._archives() if p.parent.name == user)
        most = USER_ARCHIVES * self.limit_bytes
        if total > most:
            raise Conflict(
                f"your uploaded directories have {data_size(total)}, and the limit is {data_size(most)}",
                "wait until jobs that use them have ended, or exclude more in .shoalignore",
            )

    def _archives(self) -> list[Path]:
        return [p for p in self.directory.glob(f"*/*{SUFFIX}") if DIGEST.fullmatch(p.stem)]

    async def tidy(self) -> list[Path]:
        """Delete what no unfinished job uses and nobody asked for within the last hour."""
        return await asyncio.to_thread(self._tidy, set(self._used()))

    def _tidy(self, used: set[tuple[str, str]]) -> list[Path]:
        removed = []
        for path in self._archives():
            with contextlib.suppress(OSError):
                old = time.time() - path.stat().st_mtime > KEEP_S
                if old and (path.parent.name, path.stem) not in used:
                    path.unlink()
                    removed.append(path)
        if not self._receiving:
            for left_over in self.directory.glob("*/.*"):  # the last server was killed
                left_over.unlink(missing_ok=True)
        return removed

    def forget(self, user: str) -> None:
        """The user was deleted."""
        shutil.rmtree(self.directory / user, ignore_errors=True)

    async def tidy_forever(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.tidy()
            await asyncio.sleep(TIDY_S)


async def _timely(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The body, as long as it goes on arriving."""
    parts = aiter(body)
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Invalid(f"nothing arrived for {SILENCE_S:.0f} s: upload it again", "body") from None
        yield part


class _Incoming:
    """A file that is being received, and the SHA-256 of its content."""

    def __init__(self, path: Path) -> None:
        self._path, self.size_bytes = path, 0
        self._digest, self._buffer = hashlib.sha256(), bytearray()
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: IO[bytes] = os.fdopen(opened, "wb", buffering=0)

    def add(self, data: bytes) -> bool:
        """Whether it is time to write."""
        self._buffer += data
        self.size_bytes += len(data)
        return len(self._buffer) >= WRITE_BYTES

    def write(self) -> None:
        self._digest.update(self._buffer)
        rest = memoryview(self._buffer)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._buffer = bytearray()

    def complete(self) -> str:
        self.write()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
