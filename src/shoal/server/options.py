"""Options of a server and the socket it listens on. Imports little, so that wrong options are refused quickly."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.server.home import default_home

IDLE_ACTIONS = ("none", "notify", "shrink", "pause")
DEFAULT_POLICY = "fair-afs"
UPLOAD_LIMIT_BYTES = 500 * 1000**2
MIN_LEASE_S, MAX_LEASE_S = 2.0, 7 * 86400.0


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
    parser = argparse.ArgumentParser(prog="shoal.server.serve", description="Run a Shoal server.")
    parser.add_argument("--home", type=Path, default=None, help="directory of all its state")
    parser.add_argument("--gpus", type=int, help="use N virtual GPUs instead of the real ones")
    parser.add_argument("--policy", help=f"default: the policy set last, at first {DEFAULT_POLICY}")
    parser.add_argument("--policy-option", action="append", default=[], metavar="K=V")
    shared = "co-locate waiting jobs with running ones on one GPU; default: as at the last start"
    parser.add_argument("--share", action=argparse.BooleanOptionalAction, help=shared)
    early = "start the next job on a GPU whose job is about to end; default: as at the last start"
    parser.add_argument("--pre-schedule", action=argparse.BooleanOptionalAction, help=early)
    explore = "part of the GPU time in which jobs may be measured at other sizes; 0: none"
    parser.add_argument("--explore", type=float, default=0.02, metavar="PART", help=explore)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, default=0, help="0: the port of the last start if it is free, else any"
    )
    parser.add_argument(
        "--control-port", type=int, default=0, help="port of agents; 0: that of the last start"
    )
    parser.add_argument("--advertise", help="address of this machine for others; default: that of --host")
    parser.add_argument(
        "--shared", metavar="DIR", help="directory of the jobs' state that all machines share"
    )
    parser.add_argument(
        "--lease", type=float, help="seconds that workers elsewhere go on without this server"
    )
    parser.add_argument("--cluster", type=Path, help="cluster file: an agent with virtual GPUs for each node")
    parser.add_argument("--placement", default="auto", help="where jobs go; see docs/placement.md")
    database = "URL of a PostgreSQL database, not a file; better in SHOAL_DATABASE, which `ps` does not show"
    parser.add_argument("--database", default=os.environ.get("SHOAL_DATABASE"), help=database)
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a further name of this server"
    )
    parser.add_argument(
        "--webhook-host",
        action="append",
        metavar="HOST",
        help="a host or network inside that notifications may go to, besides the public internet",
    )
    parser.add_argument(
        "--idle-after-s", type=float, help="when a job that does not use its GPUs counts as idle"
    )
    parser.add_argument("--idle-action", choices=IDLE_ACTIONS, help="what happens to idle jobs")
    parser.add_argument(
        "--reset-clock", action="store_true", help="set the server's clock back to the machine's"
    )
    parser.add_argument(
        "--upload-limit-mb", type=int, default=UPLOAD_LIMIT_BYTES // 1000**2, help="largest working directory"
    )
    parser.add_argument("--engine-settings", default="{}", metavar="JSON", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if not 1 <= given.upload_limit_mb <= 1_000_000:
        parser.error("--upload-limit-mb must be between 1 and 1000000")
    if given.gpus is not None and not 0 <= given.gpus <= 100_000:
        parser.error("--gpus must be between 0 and 100000")
    if not 0 <= given.explore <= 1:
        parser.error("--explore must be between 0 and 1")
    for option, port in {"--port": given.port, "--control-port": given.control_port}.items():
        if not 0 <= port <= 65535:
            parser.error(f"{option} must be between 0 and 65535")
    if given.cluster is not None and given.gpus is not None:
        parser.error("--cluster has the GPUs of all nodes: leave --gpus out")
    if given.lease is not None and not MIN_LEASE_S <= given.lease <= MAX_LEASE_S:
        parser.error(f"--lease must be from {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds")
    if given.idle_after_s is not None and not 1 <= given.idle_after_s <= 1e7:
        parser.error("--idle-after-s must be between 1 and 10000000")
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
        explore=given.explore,
        host=given.host,
        port=given.port,
        control_port=given.control_port,
        advertise=given.advertise,
        lease_s=given.lease,
        shared=given.shared,
        cluster=given.cluster,
        placement=given.placement,
        database=given.database,
        allow_hosts=tuple(given.allow_host),
        reset_clock=given.reset_clock,
        idle_after_s=given.idle_after_s,
        idle_action=given.idle_action,
        webhook_hosts=None if given.webhook_host is None else tuple(given.webhook_host),
        engine=json.loads(given.engine_settings),
        upload_limit_bytes=given.upload_limit_mb * 1000**2,
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
