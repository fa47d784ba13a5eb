"""Options of a server and the socket it listens on. Imports little, so that wrong options are refused quickly."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ShoalError
from shoal.server.home import default_home

IDLE_ACTIONS = ("none", "notify", "shrink", "pause")
DEFAULT_POLICY = "fair-afs"
UPLOAD_LIMIT_BYTES = 500 * 1000**2
MIN_LEASE_S, MAX_LEASE_S = 2.0, 7 * 86400.0

N = TypeVar("N", int, float)


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
    #: The part of the GPU time in which jobs may be measured at other sizes; 0: none.
    explore: float = 0.02
    host: str = "127.0.0.1"
    port: int = 0
    #: Port of agents and of workers on other machines; 0: that of the last start.
    control_port: int = 0
    #: What other machines connect to; None: `host`, or the address of this machine if that is all addresses.
    advertise: str | None = None
    #: What the port of agents listens on; None: as at the last start, at first as `control_host` says.
    control_host: str | None = None
    #: Where the state of jobs is kept, apart from the home; `none`: in the home; None: as at the last start.
    shared: str | None = None
    #: A cluster file: an agent with virtual GPUs runs here for each of its nodes. None: as at the last start.
    cluster: Path | None = None
    #: How long workers on other machines go on without the control plane; None: the default.
    lease_s: float | None = None
    database: str | None = None
    #: Names under which browsers and clients may address this server, besides its addresses and `localhost`.
    allow_hosts: tuple[str, ...] = ()
    #: Set the server's clock back to the machine's.
    reset_clock: bool = False
    #: Hosts and networks inside that notifications may go to; None: as at the last start.
    webhook_hosts: tuple[str, ...] | None = None
    #: What was written about the engine that provides machines, for `settings_from`.
    engine: dict[str, Any] = field(default_factory=dict)
    #: After how long a job that uses no GPU counts as idle, and what follows; None: as at the last start.
    idle_after_s: float | None = None
    idle_action: str | None = None
    #: The most that an uploaded working directory may have.
    upload_limit_bytes: int = UPLOAD_LIMIT_BYTES


def parse(argv: list[str]) -> Options:
    parser = _parser()
    given = vars(parser.parse_args(argv))
    if "cluster" in given and "gpus" in given:
        parser.error("--cluster has the GPUs of all nodes: leave --gpus out")
    if "policy_options" in given and "policy" not in given:
        parser.error("--policy-option needs --policy: name the policy")
    given["home"] = given.get("home", default_home()).absolute()
    given.setdefault("database", os.environ.get("SHOAL_DATABASE"))
    given["policy_options"] = dict(given.get("policy_options", ()))
    for names in ("allow_hosts", "webhook_hosts"):
        if names in given:
            given[names] = tuple(given[names])
    return Options(**given)


def _parser() -> argparse.ArgumentParser:
    """Each argument has the name of a field of `Options`. What is not given is absent, so the field has its default."""
    parser = argparse.ArgumentParser(
        prog="shoal.server.serve", description="Run a Shoal server.", argument_default=argparse.SUPPRESS
    )
    add, either, repeat = parser.add_argument, argparse.BooleanOptionalAction, "append"
    as_before = "; default: as at the last start"
    add("--home", type=Path, help="directory of all its state")
    add("--gpus", type=_within(0, 100_000), help="use N virtual GPUs instead of the real ones")
    add("--policy", help=f"default: the policy set last, at first {DEFAULT_POLICY}")
    add("--policy-option", dest="policy_options", action=repeat, type=_pair, metavar="K=V")
    add("--share", action=either, help=f"co-locate waiting jobs with running ones on one GPU{as_before}")
    early = "start the next job on a GPU whose job is about to end"
    add("--pre-schedule", action=either, help=early + as_before)
    explore = "part of the GPU time in which jobs may be measured at other sizes; 0: none"
    add("--explore", type=_within(0.0, 1.0), metavar="PART", help=explore)
    add("--host", help="address to listen on; default: 127.0.0.1")
    port = _within(0, 65535)
    add("--port", type=port, help="0, the default: the port of the last start if it is free, else any")
    add("--control-port", type=port, help="port of agents; 0, the default: that of the last start")
    add("--control-host", help="address to listen on for agents; default: that of the last start")
    add("--advertise", help="address of this machine for others; default: that of --host")
    lease = "seconds that workers elsewhere go on without this server"
    add("--lease", dest="lease_s", type=_within(MIN_LEASE_S, MAX_LEASE_S), help=lease)
    add("--shared", metavar="DIR", help="directory of the jobs' state that all machines share")
    add("--cluster", type=Path, help="cluster file: an agent with virtual GPUs for each node")
    add("--placement", help="where jobs go; see docs/placement.md")
    database = "URL of a PostgreSQL database, not a file; better in SHOAL_DATABASE, which `ps` does not show"
    add("--database", help=database)
    names = "a further name of this server"
    add("--allow-host", dest="allow_hosts", action=repeat, metavar="NAME", help=names)
    inside = "a host or network inside that notifications may go to, besides the public internet"
    add("--webhook-host", dest="webhook_hosts", action=repeat, metavar="HOST", help=inside)
    add("--idle-after-s", type=_within(1.0, 1e7), help="when a job that does not use its GPUs counts as idle")
    add("--idle-action", choices=IDLE_ACTIONS, help="what happens to idle jobs")
    add("--reset-clock", action="store_true", help="set the server's clock back to the machine's")
    add("--upload-limit-mb", dest="upload_limit_bytes", type=_megabytes, help="largest working directory")
    add("--engine-settings", dest="engine", type=json.loads, metavar="JSON", help=argparse.SUPPRESS)
    return parser


def _within(least: N, most: N) -> Callable[[str], N]:
    """A number from `least` to `most`, of their type."""
    kind = type(least)

    def number(text: str) -> N:
        try:
            found = kind(text)
        except ValueError:
            found = None
        if found is None or not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
        return found

    return number


def _megabytes(text: str) -> int:
    return _within(1, 1_000_000)(text) * 1000**2


def _pair(text: str) -> tuple[str, str]:
    key, eq, value = text.partition("=")
    if not eq:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


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


def control_host(host: str, advertise: str | None, *, has_engine: bool) -> str:
    """Where agents and workers of other machines connect: inside TLS, and only with a secret.

    They must be able to connect although the API may be for this machine only.
    """
    if not _is_loopback(host):
        return host
    if advertise is None:
        return "0.0.0.0" if has_engine else host
    return advertise if _is_loopback(advertise) else "0.0.0.0"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_of_address(host: str) -> str | None:
    if _is_loopback(host):
        return None
    return f"listening at {host} without TLS: tokens travel in the clear; put a TLS proxy in front"
