"""Atomic file writing: write a temporary file, then rename it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import polars as pl

from shoal.core.errors import ShoalError
from shoal.sim.inputs.jobs_file import COLUMNS as JOB_COLUMNS
from shoal.sim.inputs.profiles_file import COLUMNS as PROFILE_COLUMNS

TABLE_ENDINGS = (".csv", ".parquet")


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """A temporary path that replaces `path` on success and is removed on failure.

    A `path` that exists and is not a regular file (/dev/stdout, a pipe) is written directly.
    """
    path = Path(path)
    if _is_stream(path):
        with _telling_why(path):
            yield path
        return
    with _aside_of(path) as aside:
        yield aside
        aside.replace(path)


def check_writable(path: str | Path) -> None:
    """Raise if a file cannot be written, before the work whose result it will contain."""
    path = Path(path)
    if not _is_stream(path):
        with _aside_of(path):
            pass


def check_not_read(path: str | Path, inputs: Iterable[str | Path | None]) -> None:
    """Raise if an output is one of the files that the command reads."""
    path = Path(path)
    if not path.is_file():
        return
    for given in inputs:
        if given is not None and Path(given).exists() and path.samefile(given):
            raise ShoalError(
                f"{path} is read by this command and would be overwritten; write to another file"
            )


def check_table_name(path: str | Path) -> None:
    """Check the suffix of a table: .csv or .parquet. A stream gets csv."""
    path = Path(path)
    if path.suffix not in TABLE_ENDINGS and not _is_stream(path):
        raise ShoalError(f"{path}: a table is written as csv or Parquet; end its name with .csv or .parquet")


def _is_stream(path: Path) -> bool:
    """Whether the path is a stream instead of a file to replace, such as /dev/stdout."""
    device = any(path.is_relative_to(place) for place in ("/dev/stdout", "/dev/stderr", "/dev/fd", "/proc"))
    return device or (path.exists() and not path.is_file() and not path.is_dir())


@contextmanager
def _telling_why(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror or error}") from None
    except pl.exceptions.ComputeError as error:  # raised by polars if the disk is full
        raise ShoalError(f"cannot write {path}: {str(error).splitlines()[0]}") from None


@contextmanager
def _aside_of(path: Path) -> Iterator[Path]:
    """An empty file next to `path`, removed at the end if it has not been renamed."""
    if path.is_dir():
        raise ShoalError(f"{path} is a directory; give the name of a file in it")
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _telling_why(path):
            aside.touch()
            yield aside
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_jobs(path: str | Path, jobs: pl.DataFrame) -> None:
    """Write a trace in the native format, as csv or, if the name ends in .parquet, as Parquet."""
    write_tables({path: jobs_table(jobs)})


def write_profiles(path: str | Path, profiles: pl.DataFrame) -> None:
    """Write a table of profiles in the native format."""
    write_tables({path: profiles_table(profiles)})


def jobs_table(jobs: pl.DataFrame) -> pl.DataFrame:
    """The columns of jobs.csv in their order."""
    return jobs.select(_in_order(jobs, JOB_COLUMNS.known))


def profiles_table(profiles: pl.DataFrame) -> pl.DataFrame:
    """The columns of profiles.csv in their order."""
    return profiles.select(_in_order(profiles, PROFILE_COLUMNS.known))


def write_tables(tables: Mapping[str | Path, pl.DataFrame]) -> None:
    """Write several tables. None replaces its file before all are written."""
    with ExitStack() as stack:
        for path, frame in tables.items():
            aside = stack.enter_context(write_aside(path))
            if Path(path).suffix == ".parquet":
                frame.write_parquet(aside)
            else:
                frame.write_csv(aside, float_precision=_decimals(frame))


def _decimals(frame: pl.DataFrame) -> int:
    """Number of decimals: six, or more if the smallest time per iteration or weight needs them for six digits."""
    columns = [name for name in ("seconds_per_iteration", "weight") if name in frame.columns]
    smallest = min((float(frame[name].min() or 1.0) for name in columns), default=1.0)
    return 6 + max(0, math.ceil(-math.log10(smallest)))


def _in_order(frame: pl.DataFrame, columns: tuple[str, ...]) -> list[str]:
    return [name for name in columns if name in frame.columns]
