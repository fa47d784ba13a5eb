"""Options of a server and the socket it listens on. Imports little, so that wrong options are refused quickly."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.server.home import default_home

DEFAULT_POLICY = "afs-l"


class PortInUse(ShoalError):
    exit_code = 9


@dataclass(slots=True)
class Options:
    home: Path
    gpus: int | None = None
    policy: str | None = None
    policy_options: dict[str, str] = field(default_factory=dict)
    #: Placement on executors with several nodes.
    placement: str = "auto"
    #: Whether GPUs are shared and jobs pre-scheduled; None: as at the last start, at first not.
    share: bool | None = None
    pre_schedule: bool | None = None
    host: str = "127.0.0.1"
    port: int = 0
    database: str | None = None


def parse(argv: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="shoal.server.serve", description="Run a Shoal server.")
    parser.add_argument("--home", type=Path, default=None, help="directory of all its state")
    parser.add_argument("--gpus", type=int, help="use N virtual GPUs instead of the real ones")
    parser.add_argument("--policy", help=f"default: the policy set last, at first {DEFAULT_POLICY}")
    parser.add_argument("--policy-option", action="append", default=[], metavar="K=V")
    shared = "co-locate waiting jobs with running ones on one GPU; default: as at the last start"
    parser.add_argument("--share", action=argparse.BooleanOptionalAction, help=shared)
    early = "start the next job on a GPU whose job is about to end; default: as at the last start"
    parser.add_argument("--pre-schedule", action=argparse.BooleanOptionalAction, help=early)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, default=0, help="0: the port of the last start if it is free, else any"
    )
    parser.add_argument("--database", help="URL of a PostgreSQL database, instead of a file in the home")
    given = parser.parse_args(argv)
    if given.gpus is not None and not 1 <= given.gpus <= 100_000:
        parser.error("--gpus must be between 1 and 100000")
    if not 0 <= given.port <= 65535:
        parser.error("--port must be between 0 and 65535")
    options = {}
    for pair in given.policy_option:
        key, eq, value = pair.partition("=")
        if not eq:
            parser.error(f"--policy-option {pair!r} is not of the form KEY=VALUE")
        options[key] = value
    if options and given.policy is None:
        parser.error("--policy-option needs --policy: name the policy")
    return Options(
        (given.home or default_home()).absolute(),
        gpus=given.gpus,
        policy=given.policy,
        policy_options=options,
        share=given.share,
        pre_schedule=given.pre_schedule,
        host=given.host,
        port=given.port,
        database=given.database,
    )


def bind(host: str, port: int, preferred: int | None) -> socket.socket:
    """A listening socket: on the given port, else the preferred one if it is free, else any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port else [preferred or 0, 0]:
        # asyncio turns Nagle's algorithm off only for IPPROTO_TCP; otherwise answers take 40 ms longer.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, candidate))
        except OSError as error:
            sock.close()
            if candidate and not port:
                continue
            raise PortInUse(
                f"cannot listen at {host} port {candidate}: {error.strerror}; choose another --port"
            ) from None
        sock.listen(1024)
        sock.setblocking(False)
        return sock
    raise AssertionError


def warn_of_address(host: str) -> str | None:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    if host == "localhost":
        return None
    return f"listening at {host} without TLS: tokens travel in the clear; put a TLS proxy in front"
