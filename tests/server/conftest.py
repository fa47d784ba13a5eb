from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _find(program: str) -> str | None:
    found = shutil.which(program)
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), reverse=True)
    return found or (str(versions[0]) if versions else None)


def _as_other(command: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return command
    return ["runuser", "-u", _other_user(), "--", *command]


def _other_user() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A private PostgreSQL, by its URL."""
    initdb, pg_ctl = _find("initdb"), _find("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL is not installed (initdb, pg_ctl): the store is tested on SQLite only")
    import tempfile

    with tempfile.TemporaryDirectory(prefix="shoal-pg-") as place:
        home = Path(place)
        if os.geteuid() == 0:
            shutil.chown(home, _other_user())
        data, port = home / "data", _free_port()
        run = lambda *c: subprocess.run(_as_other(list(c)), check=True, capture_output=True, cwd="/")  # noqa: E731
        run(initdb, "-D", str(data), "-U", "shoal", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-k {home} -p {port} -c listen_addresses='' -c fsync=off"
        run(pg_ctl, "-D", str(data), "-o", options, "-l", str(home / "log"), "-w", "start")
        try:
            yield f"postgresql://shoal@/postgres?host={home}&port={port}"
        finally:
            run(pg_ctl, "-D", str(data), "-m", "immediate", "stop")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shoal.db'}"
    url: str = request.getfixturevalue("postgres")
    import sqlalchemy as sa

    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(sa.text("drop schema public cascade"))
        connection.execute(sa.text("create schema public"))
    engine.dispose()
    return url
