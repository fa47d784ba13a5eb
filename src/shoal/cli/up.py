"""`shoal up`: start the control plane on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click

from shoal.cli.engine_options import engine_options
from shoal.cli.options import home_option, output_option, policy_names
from shoal.cli.out import Output
from shoal.cli.report import reported

#: Exit codes of the server (docs/api.md) and ours: a port in use is a conflict, as is a home in use.
EXIT_CODES = {2: 2, 5: 5, 9: 5}
LOG_BYTES = 10 << 20
DATABASE = b"SHOAL_DATABASE="


@click.command()
@click.option(
    "--gpus",
    type=click.IntRange(min=0),
    help="Number of virtual GPUs, on the CPU. 0: use no GPU of this machine. Default: the real GPUs.",
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
@click.option(
    "--explore",
    type=click.FloatRange(0, 1),
    help="Part of the GPU time in which jobs may be measured at other sizes. Default: 0.02.",
)
@click.option("--host", help="Address to listen on. Default: only this machine.")
@click.option("--port", type=click.IntRange(min=0, max=65535), help="Port to listen on. Default: a free one.")
@click.option(
    "--control-port",
    type=click.IntRange(min=0, max=65535),
    help="Port where other machines connect, inside TLS. Default: that of the last start.",
)
@click.option(
    "--control-host",
    help="Address to listen on for other machines. Default: all if --advertise names one that they reach.",
)
@click.option("--advertise", help="Address of this machine for other machines. Default: that of --host.")
@click.option(
    "--shared",
    metavar="DIR",
    help="A directory that the machines share, for checkpoints and what a pause saves. `none`: the home.",
)
@click.option("--lease", help="How long workers on other machines go on without this server. Default: 10m.")
@click.option("--placement", help="Where jobs go: auto, moving, liquid and more; see docs/placement.md.")
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    help="Try several machines on this one: an agent with virtual GPUs for each node of a cluster file.",
)
@click.option(
    "--database",
    envvar="SHOAL_DATABASE",
    help="postgresql://..., a database in place of a file. Better in SHOAL_DATABASE: `ps` shows arguments.",
)
@click.option(
    "--allow-host",
    multiple=True,
    help="Name of this server in requests, besides its addresses. Repeat for more.",
)
@click.option(
    "--webhook-host",
    multiple=True,
    help="Host or network inside that notifications may go to, besides the public internet. Repeat for more.",
)
@click.option(
    "--idle-after", help="A job that has not used its GPUs for this long is idle. Default: 10m at first."
)
@click.option(
    "--idle-action",
    type=click.Choice(["none", "notify", "shrink", "pause"]),
    help="What happens to idle jobs: notify (the default at first), shrink, pause, or none.",
)
@click.option(
    "--reset-clock", is_flag=True, help="Set the server's clock back to the machine's; see `shoal doctor`."
)
@click.option("--foreground", is_flag=True, help="Run in the foreground; Ctrl-C stops the server.")
@click.option("--timeout", default="60s", help="How long to wait until the server answers.")
@output_option
@home_option
@reported
@engine_options
def up(
    gpus: int | None,
    policy: str | None,
    policy_option: tuple[str, ...],
    share: bool | None,
    pre_schedule: bool | None,
    explore: float | None,
    host: str | None,
    port: int | None,
    control_port: int | None,
    control_host: str | None,
    advertise: str | None,
    shared: str | None,
    lease: str | None,
    placement: str | None,
    cluster: Path | None,
    database: str | None,
    allow_host: tuple[str, ...],
    webhook_host: tuple[str, ...],
    idle_after: str | None,
    idle_action: str | None,
    reset_clock: bool,
    engine: dict[str, Any],
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
    if cluster is not None:
        require("shoal up --cluster", "sim")  # it reads the same file
    where = (home or default_home()).expanduser().absolute()
    limit_s = seconds(timeout)
    command = _command(where, gpus, policy, policy_option, host, port)
    others = {
        "--control-port": control_port,
        "--control-host": control_host,
        "--advertise": advertise,
        "--shared": shared if shared in (None, "none") else Path(shared).expanduser().absolute(),
        "--lease": None if lease is None else seconds(lease),
        "--placement": placement,
        "--cluster": None if cluster is None else cluster.expanduser().absolute(),
    }
    command += [word for name, value in others.items() if value is not None for word in (name, str(value))]
    command += [word for name in allow_host for word in ("--allow-host", name)]
    command += [] if explore is None else ["--explore", str(explore)]
    command += [word for name in webhook_host for word in ("--webhook-host", name)]
    command += [] if idle_after is None else ["--idle-after-s", str(seconds(idle_after))]
    command += [] if idle_action is None else ["--idle-action", idle_action]
    command += ["--reset-clock"] if reset_clock else []
    command += ["--engine-settings", json.dumps(engine)] if engine else []
    if database is not None:
        os.environ["SHOAL_DATABASE"] = database  # not as an argument: it may contain a password
    for name, wish in {"share": share, "pre-schedule": pre_schedule}.items():
        command += [] if wish is None else [f"--{name}" if wish else f"--no-{name}"]
    if foreground:
        os.execv(sys.executable, command)
    running = _running(where)
    if running is None:
        _start(command, where, limit_s)
    else:
        _refuse_unused(
            where,
            {
                "--explore": explore is not None,
                "--engine": engine,
                "--policy-option": policy_option,
                "--host": host,
                "--port": port,
                "--database": database is not None and database != _database_of(where),
                **{name: value is not None for name, value in others.items()},
            },
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
) -> list[str]:
    made = [sys.executable, "-m", "shoal.server.serve", "--home", str(home)]
    for name, value in {
        "--gpus": gpus,
        "--policy": policy,
        "--host": host,
        "--port": port,
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


def _database_of(home: Path) -> str | None:
    """The database that the server of this home was started with, if another than its file: `up` passes it on so."""
    from shoal.client.connection import server_of

    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{server_of(home).pid}/environ").read_bytes().split(b"\0")
        return next((os.fsdecode(v[len(DATABASE) :]) for v in variables if v.startswith(DATABASE)), None)
    return None


def _running(home: Path) -> str | None:
    """The address of the server of this home, if one answers."""
    from shoal.client import Client
    from shoal.client.connection import server_of
    from shoal.client.errors import ClientError

    try:
        address = server_of(home).address
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
    from shoal.server.home import Home

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    path = home / "server.log"
    Home(home).make()  # before anything is written there: whoever owns it could have laid a link
    try:
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(home / "server.log.1")
        log = open(path, "a+", opener=opened)  # noqa: SIM115
        log.seek(0, os.SEEK_END)
        return log
    except OSError as error:
        raise ShoalError(f"{home}: {(error.strerror or str(error)).lower()}; choose another --home") from None


def _last_words(text: str) -> str:
    """The error that the server printed last, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix("shoal: ") for line in lines if line.startswith("shoal: ")]
    return (own or lines or [""])[-1].removeprefix("shoal.server.serve: error: ")


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
    from shoal.client.connection import server_of
    from shoal.client.errors import Conflict, NotAllowed

    try:
        with Client(home=home) as client:
            status = client.status()
    except NotAllowed as error:  # the first admin was deleted: it runs, but does not tell us more
        asked = was_up and any(wish is not None for wish in (gpus, policy, *sharing.values()))
        if asked or output not in (Output.TABLE, Output.WIDE, Output.NAME):
            raise
        print(server_of(home).address, flush=True)
        say(f"shoal {'is already' if was_up else 'is'} up, but does not show its settings: {error}")
        return
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
