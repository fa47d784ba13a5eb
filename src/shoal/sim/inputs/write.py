"""Writing files whole or not at all: aside first, then renamed to their name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import polars as pl

from shoal.core.errors import ShoalError
from shoal.sim.inputs.jobs import COLUMNS as JOB_COLUMNS
from shoal.sim.inputs.profiles import COLUMNS as PROFILE_COLUMNS


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` if all goes well and vanishes if not.

    What is there already and is not a plain file (/dev/stdout, a pipe) is written to directly.
    """
    path = Path(path)
    if _is_stream(path):
        yield path
        return
    with _aside_of(path) as aside:
        yield aside
        aside.replace(path)


def check_writable(path: str | Path) -> None:
    """The error of a file that cannot be written, before the work whose result it is to hold."""
    path = Path(path)
    if not _is_stream(path):
        with _aside_of(path):
            pass


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _aside_of(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, gone at the end if it has not been renamed."""
    if path.is_dir():
        raise ShoalError(f"{path} is a directory; give the name of a file in it")
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.touch()
        yield aside
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_jobs(path: str | Path, jobs: pl.DataFrame) -> None:
    """A trace in the native format, as csv or, where the name ends in .parquet, as Parquet."""
    _write(path, jobs.select(_in_order(jobs, JOB_COLUMNS.known)))


def write_profiles(path: str | Path, profiles: pl.DataFrame) -> None:
    """A table of profiles in the native format."""
    _write(path, profiles.select(_in_order(profiles, PROFILE_COLUMNS.known)))


def _in_order(frame: pl.DataFrame, columns: tuple[str, ...]) -> list[str]:
    return [name for name in columns if name in frame.columns]


def _write(path: str | Path, frame: pl.DataFrame) -> None:
    with write_aside(path) as aside:
        if Path(path).suffix == ".parquet":
            frame.write_parquet(aside)
        else:
            frame.write_csv(aside, float_precision=6)
