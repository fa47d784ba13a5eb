"""Uploaded working directories on a machine: fetched once, verified, unpacked for each job, evicted when unused.

    STATE/trees/DIGEST.tar      archives, as the control plane sent them
    STATE/workdirs/JOB/DIGEST   what a job runs in. All its workers on this machine share it.

A job may write into its directory. What it writes stays on this machine and is deleted some time after its last worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from weakref import WeakValueDictionary

from shoal.executors.accounts import Account, account_for, base_directory, make_base
from shoal.executors.base import OwnAccount, RunAs
from shoal.wire import agent_messages as am

log = logging.getLogger("shoal.agents")

CACHE_BYTES = 20 * 1000**3
UNUSED_S = 86400.0
"""A directory that no worker has used for so long is deleted."""


class TreeError(Exception):
    """The directory cannot be provided. The message says why."""


class TreeFetcher:
    """Fetches archives over the agent's connection, and goes on where it was when the connection broke."""

    def __init__(self, directory: Path, send: Callable[[am.FetchTree], None]) -> None:
        """`send` queues a request, or drops it if there is no connection."""
        self._directory, self._send = directory, send
        self._incoming: dict[str, _Incoming] = {}
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left_over in directory.glob("*.part"):
            left_over.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        return self._directory / f"{digest}.tar"

    async def fetch(self, digest: str) -> Path:
        """The archive. Several callers share one transfer. Raises TreeError."""
        path = self.path(digest)
        if digest not in self._incoming:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return path
            self._incoming[digest] = incoming = _Incoming(path.with_suffix(".part"))
            self._send(am.FetchTree(digest, 0))
        else:
            incoming = self._incoming[digest]
        await asyncio.shield(incoming.done)
        return path

    def connected(self) -> None:
        """A new connection is open: the requests on the old one are lost."""
        for digest, incoming in self._incoming.items():
            self._send(am.FetchTree(digest, incoming.position))

    def received(self, part: am.TreePart) -> None:
        incoming = self._incoming.get(part.digest)
        if incoming is None or part.begin != incoming.position:
            return  # an answer to a request of an earlier connection
        try:
            if part.why:
                raise TreeError(part.why)
            incoming.take(part.data)
            if not part.data or incoming.position >= part.size_bytes:
                incoming.complete(part, self.path(part.digest))
        except (OSError, TreeError) as error:
            del self._incoming[part.digest]
            incoming.fail(error)
            return
        if incoming.done.done():
            del self._incoming[part.digest]
        else:
            self._send(am.FetchTree(part.digest, incoming.position))


class _Incoming:
    def __init__(self, path: Path) -> None:
        self._path, self.position = path, 0
        self._digest = hashlib.sha256()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._file = path.open("wb")

    def take(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.position += len(data)

    def complete(self, part: am.TreePart, path: Path) -> None:
        self._file.close()
        if self.position != part.size_bytes or self._digest.hexdigest() != part.digest:
            raise TreeError("the working directory did not arrive as it was uploaded: submit the job again")
        os.replace(self._path, path)
        self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
        why = error if isinstance(error, TreeError) else TreeError(f"cannot store it here: {error}")
        self.done.set_exception(why)
        self.done.exception()  # it may be that nobody waits any more


class Workdirs:
    """The directories of jobs on this machine. `in_use`: the jobs that have workers here."""

    def __init__(
        self,
        state_directory: Path,
        fetcher: TreeFetcher,
        in_use: Callable[[], Collection[str]],
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._directory, self._fetcher = state_directory / "workdirs", fetcher
        #: For jobs under accounts of their own, which cannot enter the agent's directory.
        self._outside = base_directory() / f"trees-{hashlib.sha256(bytes(state_directory)).hexdigest()[:16]}"
        self._in_use, self._cache_bytes = in_use, cache_bytes
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        #: Directories that somebody prepares at the moment.
        self._preparing: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, job: str, digest: str, run_as: RunAs = OwnAccount()) -> Path:  # noqa: B008
        """The directory with this content for a job that runs under an account. Raises TreeError."""
        try:
            # Whether a job may run as root is not decided here: the executor refuses it.
            owner = account_for(run_as, allow_root=True)
            if owner is not None:
                make_base()
        except OSError as error:
            raise TreeError(error.strerror) from None
        path = (self._directory if owner is None else self._outside) / job / digest
        lock = self._preparing.setdefault(path, asyncio.Lock())
        async with lock:
            if path.is_dir():
                os.utime(path)
                return path
            try:
                archive = await self._fetcher.fetch(digest)
                await asyncio.to_thread(unpack, archive, path, owner)
            except (OSError, tarfile.TarError) as error:
                raise TreeError(f"cannot unpack it here: {error}") from None
            try:
                await self._evict(archive.parent)
            except OSError:
                log.exception("unused working directories were not deleted")
        return path

    async def _evict(self, archives: Path) -> None:
        """Delete what was not used for a day, and then the longest unused until the rest is small enough."""
        measured = await asyncio.to_thread(_measure, [archives.glob("*.tar"), *self._all_directories()])
        total_bytes = sum(size_bytes for _, _, size_bytes in measured)
        evicted: list[Path] = []
        # From here to the last renaming nothing else runs on this thread: no job can begin to use what is evicted.
        jobs = {*self._in_use(), *(path.parent.name for path in self._preparing)}
        digests = {path.name for path in self._preparing}
        for at_s, path, size_bytes in measured:
            if total_bytes <= self._cache_bytes and time.time() - at_s <= UNUSED_S:
                break
            if path.stem in digests if path.parent == archives else path.parent.name in jobs:
                continue
            away = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, away)
                evicted.append(away)
                total_bytes -= size_bytes
        await asyncio.to_thread(_delete, evicted)

    def _all_directories(self) -> list[Iterator[Path]]:
        return [self._directory.glob("*/*"), self._outside.glob("*/*")]


def unpack(archive: Path, target: Path, owner: Account | None = None) -> None:
    """Unpack into a directory that appears complete or not at all, and belongs to `owner`.

    Nothing can be written elsewhere: names are checked, only files, directories and links are made, links last.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if owner is not None:  # the owner passes through the directories above, which are of this process
        for path in (target.parent.parent, target.parent):
            path.chmod(0o711)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    temporary.mkdir(mode=0o700)
    try:
        with tarfile.open(archive, "r:") as tar:
            links: list[tuple[Path, str]] = []
            for member in tar:
                path = temporary / _checked(member)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.issym():
                    links.append((path, member.linkname))
                else:
                    _write(tar, member, path)
        for path, to in links:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(to)
        if owner is not None:
            _give_away(temporary, owner)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _checked(member: tarfile.TarInfo) -> PurePosixPath:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise TreeError(f"the archive has a name that leads out of it: {member.name!r}")
    if not (member.isreg() or member.isdir() or member.issym()) or member.issparse():
        raise TreeError(f"the archive has {member.name!r}, which is no file, directory or symbolic link")
    return name


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if member.mode & 0o100 else 0o644)
    with os.fdopen(opened, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)


def _give_away(directory: Path, owner: Account) -> None:
    """Nobody but root can enter the directory yet, so no name in it can lead elsewhere meanwhile."""
    for where, directories, files in os.walk(directory, topdown=False):
        for name in (*directories, *files):
            os.lchown(os.path.join(where, name), owner.uid, owner.gid)
    os.lchown(directory, owner.uid, owner.gid)


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for where, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _measure(found: list[Iterator[Path]]) -> list[tuple[float, Path, int]]:
    """(time of the last use, path, bytes) of each that is found, oldest first."""
    measured = []
    for path in itertools.chain(*found):
        with contextlib.suppress(FileNotFoundError):  # another eviction was faster
            measured.append((path.stat().st_mtime, path, _size_bytes(path)))
    return sorted(measured)


def _delete(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # the job has no other directory here
        else:
            path.unlink(missing_ok=True)
