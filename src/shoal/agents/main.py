"""An agent as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from shoal import __version__
from shoal.agents.agent import Agent, AgentError, lease_path, node_facts
from shoal.agents.join_tokens import JoinToken, TokenError
from shoal.agents.joining import Membership
from shoal.agents.leaving_file import watch_leaving_file
from shoal.core.errors import ShoalError
from shoal.executors.keeper import boot_clock_s
from shoal.executors.local import LocalExecutor
from shoal.wire.atomic_file import write_atomically
from shoal.wire.channel import parse_address
from shoal.wire.messages import WireError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    join: str
    token_file: Path | None
    gpus: int | None
    gpu_type: str | None
    rack: str
    domain: str
    address: str | None
    name: str | None
    state: Path | None
    allow_root: bool = False
    #: What workers listen on, if not on `address`.
    bind: str = ""


def run(options: AgentOptions) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_run(options))
    except (AgentError, TokenError, OSError) as error:
        raise ShoalError(str(error)) from None


async def _run(options: AgentOptions) -> None:
    name = options.name or socket.gethostname().partition(".")[0]
    if NAME.fullmatch(name) is None:
        raise AgentError(f"{name!r} is not a name of a node: give letters and digits with --name")
    try:
        parse_address(options.join)
    except WireError as error:
        raise AgentError(f"--join: {error}; `shoal node add` prints the whole command") from None
    state = options.state or Path.home() / ".local" / "state" / "shoal-agent" / name
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    member = Membership(state, name, options.join, _token(options.token_file, state), options.token_file)
    executor = LocalExecutor(
        options.gpus, lease_file=lease_path(state), allow_root=options.allow_root, own_files=state
    )
    if options.gpus is None and executor.why_virtual:
        raise AgentError(f"no GPU is found here: {executor.why_virtual}; --gpus N tries it with virtual ones")
    address = options.address or _own_address(options.join)
    nodes = node_facts(name, executor.nodes(), address, options.gpu_type, options.rack, options.domain)
    agent = Agent(
        name, state, executor, nodes, member.connect,
        versions=versions(), save_credential=member.save,
        open_session=executor.session, bind=options.bind,
    )  # fmt: skip
    task = asyncio.create_task(agent.run())

    def end() -> None:
        agent.say_goodbye()
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    leaving_file = os.environ.get("SHOAL_LEAVING_FILE")
    watch = (
        asyncio.create_task(watch_leaving_file(Path(leaving_file), agent.leaving, boot_clock_s))
        if leaving_file
        else None
    )
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if watch is not None:
        watch.cancel()


def _token(file: Path | None, state: Path) -> JoinToken:
    """From the file or, after a first join, what is left of it in the state directory."""
    kept, credential = state / "fingerprint", state / "credential"
    try:
        if file is None:
            raise FileNotFoundError
        token = JoinToken.parse(file.read_text())
    except FileNotFoundError:
        if not (kept.exists() and credential.exists()):
            what = "--token-file" if file is None else str(file)
            raise AgentError(f"{what} is missing: `shoal node join-token create` makes a token") from None
        return JoinToken(kept.read_text().strip(), "")
    except (OSError, TokenError, UnicodeDecodeError) as error:
        raise AgentError(f"{file}: {error}") from None
    before = kept.read_text().strip() if kept.exists() else ""
    if before != token.fingerprint:
        if before:
            credential.unlink(missing_ok=True)  # it was for another control plane
        write_atomically(kept, token.fingerprint)
    return token


def versions() -> dict[str, str]:
    """What `doctor` compares over all machines."""
    found = {"shoal": __version__, "python": python_version()}
    with contextlib.suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    return found


def _own_address(join: str) -> str:
    """The address by which this machine reaches the server."""
    host, port = parse_address(join)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise AgentError(f"--join: the name {host!r} cannot be resolved here: {error}") from None
    why = ""
    for family, kind, _, _, server in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(server)  # sends nothing: the kernel only picks the way
                return str(probe.getsockname()[0])
        except OSError as error:
            why = error.strerror or str(error)
    raise AgentError(
        f"no route from this machine to {host} (--join): {why}; "
        "if this is temporary, give this machine's own address with --address"
    )
