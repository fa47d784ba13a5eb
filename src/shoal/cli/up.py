"""`shoal up`: start the control plane on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import click

from shoal.cli.options import home_option, output_option, policy_names
from shoal.cli.out import Output
from shoal.cli.report import reported

#: Exit codes of the server (docs/api.md) and ours: a port in use is a conflict, as is a home in use.
EXIT_CODES = {2: 2, 5: 5, 9: 5}
LOG_BYTES = 10 << 20


@click.command()
@click.option(
    "--gpus", type=click.IntRange(min=1), help="Number of virtual GPUs, on the CPU. Default: the real GPUs."
)
@click.option("--policy", shell_complete=policy_names, help="The policy; `shoal policy ls` lists them.")
@click.option("--policy-option", multiple=True, help="Option of the policy: NAME=value. Repeat for more.")
@click.option(
    "--share/--no-share",
    default=None,
    help="Waiting jobs may be co-located on GPUs of other jobs; see docs/placement.md.",
)
@click.option(
    "--pre-schedule/--no-pre-schedule",
    default=None,
    help="The next job prepares on a GPU whose job is about to end.",
)
@click.option("--host", help="Address to listen on. Default: only this machine.")
@click.option("--port", type=click.IntRange(min=0, max=65535), help="Port to listen on. Default: a free one.")
@click.option("--database", help="postgresql://..., a database in place of a file.")
@click.option("--foreground", is_flag=True, help="Run in the foreground; Ctrl-C stops the server.")
@click.option("--timeout", default="60s", help="How long to wait until the server answers.")
@output_option
@home_option
@reported
def up(
    gpus: int | None,
    policy: str | None,
    policy_option: tuple[str, ...],
    share: bool | None,
    pre_schedule: bool | None,
    host: str | None,
    port: int | None,
    database: str | None,
    foreground: bool,
    timeout: str,
    output: Output,
    home: Path | None,
) -> None:
    """Start the control plane in the background and print its address. `shoal down` stops it."""
    from shoal.cli.extras import require
    from shoal.cli.times import seconds
    from shoal.server.home import default_home

    require("shoal up", "server")
    where = (home or default_home()).expanduser().absolute()
    limit_s = seconds(timeout)
    command = _command(where, gpus, policy, policy_option, host, port, database)
    for name, wish in {"share": share, "pre-schedule": pre_schedule}.items():
        command += [] if wish is None else [f"--{name}" if wish else f"--no-{name}"]
    if foreground:
        os.execv(sys.executable, command)
    running = _running(where)
    if running is None:
        _start(command, where, limit_s)
    else:
        _refuse_unused(
            where, {"--policy-option": policy_option, "--host": host, "--port": port, "--database": database}
        )
    sharing = {"share": share, "pre_schedule": pre_schedule}
    _tell(where, output, gpus=gpus, policy=policy, sharing=sharing, was_up=running is not None)


def _command(
    home: Path,
    gpus: int | None,
    policy: str | None,
    policy_options: Sequence[str],
    host: str | None,
    port: int | None,
    database: str | None,
) -> list[str]:
    made = [sys.executable, "-m", "shoal.server.serve", "--home", str(home)]
    for name, value in {
        "--gpus": gpus,
        "--policy": policy,
        "--host": host,
        "--port": port,
        "--database": database,
    }.items():
        made += [name, str(value)] if value is not None else []
    for option in policy_options:
        made += ["--policy-option", option]
    return made


def _refuse_unused(home: Path, given: dict[str, object]) -> None:
    """Refuse start options if a server runs already."""
    from shoal.client.errors import Conflict

    unused = [option for option, value in given.items() if value]
    if unused:
        raise Conflict(
            f"{', '.join(unused)}: a server runs on {home} already, so this would have no effect; "
            "stop it with `shoal down` first"
        )


def _running(home: Path) -> str | None:
    """The address of the server of this home, if one answers."""
    from shoal.client import Client
    from shoal.client.connection import server_file
    from shoal.client.errors import ClientError

    try:
        address = str(server_file(home)["address"])
        with Client(address, token="none") as client:
            return address if client.healthy() else None
    except ClientError:
        return None


def _start(command: list[str], home: Path, limit_s: float) -> None:
    """Start the server in its own session, so that it outlives this terminal; it logs to server.log."""
    from shoal.client.errors import ClientError, TimedOut

    log = _open_log(home)
    with log:
        begin = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
        deadline = time.monotonic() + limit_s
        while _running(home) is None:
            code = process.poll()
            if code is not None:
                log.seek(begin)
                failed = ClientError(
                    _last_words(log.read()) or f"the server ended with {code}; see {log.name}"
                )
                failed.exit_code = EXIT_CODES.get(code, 1)
                raise failed
            if time.monotonic() > deadline:
                process.terminate()
                raise TimedOut(f"the server does not answer after {limit_s:g} s; see {log.name}")
            time.sleep(0.05)


def _open_log(home: Path) -> IO[str]:
    """Open server.log to append; a long one is renamed first."""
    from shoal.core.errors import ShoalError

    path = home / "server.log"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(home / "server.log.1")
        log = open(path, "a+", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        log.seek(0, os.SEEK_END)
        return log
    except OSError as error:
        raise ShoalError(f"{home}: {(error.strerror or str(error)).lower()}; choose another --home") from None


def _last_words(text: str) -> str:
    """The error that the server printed last, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix("shoal: ") for line in lines if line.startswith("shoal: ")]
    return (own or lines or [""])[-1]


def _tell(
    home: Path,
    output: Output,
    *,
    gpus: int | None,
    policy: str | None,
    sharing: dict[str, bool | None],
    was_up: bool,
) -> None:
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.client import Client
    from shoal.client.errors import Conflict

    with Client(home=home) as client:
        status = client.status()
    if was_up and gpus not in (None, status.total_gpus):
        raise Conflict(
            f"a server with {status.total_gpus} GPUs runs on {home}; stop it with `shoal down` first"
        )
    if was_up and policy not in (None, status.policy):
        raise Conflict(
            f"a server with policy {status.policy} runs on {home}; change it with `shoal policy set {policy}`"
        )
    for name, wish in sharing.items():
        if was_up and wish not in (None, getattr(status, name)):
            runs = f"a server {'without' if wish else 'with'} --{name.replace('_', '-')} runs on {home}"
            raise Conflict(f"{runs}; stop it with `shoal down --keep-jobs` first, then start it again")
    if not output.for_people:
        print_document(output, status, status.address)
        return
    kind = "virtual GPUs, on the CPU" if status.virtual else "GPUs"
    say(f"shoal {'is already' if was_up else 'is'} up: {status.total_gpus} {kind}, policy {status.policy}")
    print(status.address)
    say(f"state in {home}, token in {home / 'admin.token'}")
    for warning in status.warnings:
        say(f"warning: {warning}")
    say("next: shoal run --gpus 1..4 -- python train.py   shoal ps   shoal down")
