"""Pack a working directory for machines that do not share it: one archive, named by the SHA-256 of its content.

What `.gitignore` and `.shoalignore` exclude stays behind, by git's rules, and so does `.git`. In one directory the
lines of `.shoalignore` come last, so `!name` there brings back what `.gitignore` excludes.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pathspec import GitIgnoreSpec

from shoal.core.errors import ShoalError
from shoal.core.words import data_size

IGNORE_FILES = (".gitignore", ".shoalignore")
ALWAYS_IGNORED = ".git"
MOST_ENTRIES = 100_000
#: So many further entries are looked at when a directory is too large, to name its largest files.
LOOK_ON_ENTRIES = 20_000
MOST_NAMED = 3


class WorkdirError(ShoalError):
    """The directory cannot be uploaded. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, directory or symbolic link of the tree."""

    name: str  # relative to the top, with slashes
    kind: str  # file, directory or link
    mode: int = 0o644
    size_bytes: int = 0
    target: str = ""


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive that is ready to be sent."""

    digest: str
    size_bytes: int
    files: int
    archive: IO[bytes]


def find_entries(top: Path, limit_bytes: int) -> list[Entry]:
    """What is uploaded of a directory, in a fixed order. Raises WorkdirError if it is too much.

    Nothing is read but names and sizes, and counting ends soon after the limit: also 100 GB are refused at once.
    """
    if not top.is_dir():
        raise WorkdirError(f"{top} is not a directory: nothing can be uploaded")
    found: list[Entry] = []
    size_bytes = 0
    stop_at: int | None = None
    for entries, entry in enumerate(_walk(top), 1):
        size_bytes += entry.size_bytes
        found.append(entry)
        if stop_at is None and (size_bytes > limit_bytes or entries > MOST_ENTRIES):
            stop_at = entries + LOOK_ON_ENTRIES
        if stop_at is not None and entries >= stop_at:
            break
    if stop_at is not None:
        raise _too_large(top, found, size_bytes, limit_bytes)
    return sorted(found, key=lambda e: e.name)


def _too_large(top: Path, found: Sequence[Entry], size_bytes: int, limit_bytes: int) -> WorkdirError:
    remedy = (
        "exclude what the job does not need in .shoalignore, or put data on a path that all machines share"
    )
    if size_bytes <= limit_bytes:
        return WorkdirError(f"{top} has more than {MOST_ENTRIES:,} files and directories: {remedy}")
    largest = heapq.nlargest(MOST_NAMED, found, key=lambda e: e.size_bytes)
    named = ", ".join(f"{e.name} ({data_size(e.size_bytes)})" for e in largest if e.size_bytes)
    return WorkdirError(
        f"{top} has at least {data_size(size_bytes)}, and {data_size(limit_bytes)} is the limit of an upload; "
        f"the largest files: {named}; {remedy}"
    )


def _walk(top: Path) -> Iterator[Entry]:
    """All entries that are not ignored, each directory before what is in it."""
    pending: list[tuple[str, list[tuple[str, GitIgnoreSpec]]]] = [("", [])]
    while pending:
        here, specs = pending.pop()
        specs = specs + _rules_of(top, here)
        try:
            with os.scandir(top / here) as listing:
                children = sorted(listing, key=lambda e: e.name)
        except OSError as error:
            raise _unreadable(top / here, error) from None
        for child in children:
            name = f"{here}{child.name}"
            entry = _entry(child, name)
            if entry is None or child.name == ALWAYS_IGNORED or _is_ignored(entry, specs):
                continue
            yield entry
            if entry.kind == "directory":
                pending.append((f"{name}/", specs))


def _entry(child: os.DirEntry[str], name: str) -> Entry | None:
    """None: it is a socket, a pipe or a device, or was deleted just now."""
    try:
        if child.is_symlink():
            return Entry(name, "link", target=os.readlink(child.path))
        found = child.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return Entry(name, "directory", 0o755)
    if stat.S_ISREG(found.st_mode):
        return Entry(name, "file", 0o755 if found.st_mode & 0o100 else 0o644, found.st_size)
    return None


def _rules_of(top: Path, here: str) -> list[tuple[str, GitIgnoreSpec]]:
    lines: list[str] = []
    for name in IGNORE_FILES:
        path = top / here / name
        try:
            lines += path.read_text(errors="replace").splitlines()
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as error:
            raise _unreadable(path, error) from None
    try:
        return [(here, GitIgnoreSpec.from_lines(lines))] if lines else []
    except ValueError as error:
        raise WorkdirError(f"an ignore file in {top / here} is not understood: {error}") from None


def _is_ignored(entry: Entry, specs: Sequence[tuple[str, GitIgnoreSpec]]) -> bool:
    """The rules nearest to the entry decide."""
    slash = "/" if entry.kind == "directory" else ""
    for where, spec in reversed(specs):
        ignored = spec.check_file(entry.name.removeprefix(where) + slash).include
        if ignored is not None:
            return bool(ignored)
    return False


def _unreadable(path: Path, error: OSError) -> WorkdirError:
    return WorkdirError(f"{path}: {(error.strerror or str(error)).lower()}; exclude it in .shoalignore")


@contextmanager
def packed(top: Path, limit_bytes: int) -> Iterator[Packed]:
    """The archive of a directory in a temporary file. Equal content gives an equal archive, whoever packs it when."""
    entries = find_entries(top, limit_bytes)
    with tempfile.TemporaryFile() as file:
        counted = _Digest(file)
        with tarfile.open(fileobj=counted, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            for entry in entries:
                _add(tar, top, entry)
        size_bytes = file.tell()
        file.seek(0)
        files = sum(entry.kind == "file" for entry in entries)
        yield Packed(counted.digest.hexdigest(), size_bytes, files, file)


def _add(tar: tarfile.TarFile, top: Path, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.mode = entry.mode
    if entry.kind == "directory":
        info.type = tarfile.DIRTYPE
    elif entry.kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    else:
        try:
            with open(top / entry.name, "rb") as file:
                info.size = os.fstat(file.fileno()).st_size
                if info.size != entry.size_bytes:
                    raise WorkdirError(f"{top / entry.name} changed while it was packed: try again")
                tar.addfile(info, file)
        except OSError as error:
            raise _unreadable(top / entry.name, error) from None
        return
    tar.addfile(info)


class _Digest:
    """A file that is written to, with the SHA-256 of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)
