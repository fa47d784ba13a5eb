"""Messages between the control plane and the agents on machines.

Commands are numbered and repeated after a broken connection until the agent acknowledges them. The end of a worker is
repeated until the control plane sends `Forget`. Log bytes carry their position. A message of any kind may therefore be
lost with its connection. Within one connection messages arrive in order.

On the wire a message is one MessagePack map with its type in `type`: log chunks are bytes, which JSON cannot carry.
Decoding is strict: an unknown type or field, a missing field and a value of the wrong type raise `WireError`.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shoal.wire.messages import MAX_MESSAGE_BYTES, Int, WireError

AGENT_PROTOCOL = 4
"""Raised whenever a message changes its meaning, and with `PROTOCOL` and `PEER_PROTOCOL`: workers are of the version of
their agent. The control plane refuses agents with another number."""

WORKER_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z"
WorkerId = Annotated[str, Meta(pattern=WORKER_PATTERN)]
"""The id of a worker. It names a directory on the node, so it must not lead to another one."""

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
TREE_PART_BYTES = 1 << 20

SessionId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
SESSION_PART_BYTES = 1 << 16


def is_worker_id(text: str) -> bool:
    return re.search(WORKER_PATTERN, text) is not None


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    pass


class NodeFacts(_Part, frozen=True):
    """A node that an agent offers. A machine with GPUs of several types offers one node for each type."""

    name: str
    gpus: Int
    gpu_type: str
    virtual: bool
    devices: tuple[str, ...] = ()
    rack: str = "rack0"
    domain: str = "domain0"
    gpu_memory_mb: float = 16_384.0
    address: str = "127.0.0.1"  # what other nodes connect to


# Agent to control plane


class AgentHello(_Message, frozen=True):
    """The first message on a connection."""

    agent: str
    run: str  # random, new for each process of the agent
    nodes: tuple[NodeFacts, ...]
    clock_s: float  # the agent's lease clock now. The lease that `Welcome` grants begins at this time.
    wall_s: float  # the agent's wall clock now
    credential: str = ""  # the secret whose hash the control plane knows. Sent inside TLS only.
    versions: dict[str, str] = {}  # of shoal, python and torch
    workers: tuple[str, ...] = ()  # started and not forgotten, whether they still run or not
    epoch: str = ""  # of the control plane that `done` belongs to
    done: Int = 0  # the last command that it has carried out
    protocol: Int = AGENT_PROTOCOL


class Renew(_Message, frozen=True):
    """Request another lease, which begins at `clock_s` of the agent's lease clock. Also serves as a heartbeat."""

    clock_s: float
    wall_s: float  # its wall clock now


class Ack(_Message, frozen=True):
    """All commands up to `done` have been carried out."""

    done: Int


class Exited(_Message, frozen=True):
    """A worker has ended, and no process of it is left."""

    worker: WorkerId
    code: Int | None = None
    signal: str | None = None
    why: str = ""
    began: bool = True
    told: bool = False
    ago_s: float | None = None
    log_end: Int = 0  # length of its whole output
    node_lost: bool = False  # it was ended because the lease of its node had, or its machine was lost


class LogChunk(_Message, frozen=True):
    """Output of a worker. It continues the output before `previous`.

    `position` is the position of the first byte of `data`. It is greater than `previous` if output was rotated away
    before it could be sent. `stamps_ahead_s`: by how much the clock that stamped the lines is ahead of the lease clock.
    """

    worker: WorkerId
    previous: Int
    position: Int
    data: bytes
    stamps_ahead_s: float = 0.0


class Usage(_Part, frozen=True):
    node: str
    gpu: Int
    utilisation: float
    memory_mb: float


class UsageReport(_Message, frozen=True):
    gpus: tuple[Usage, ...]


class Ports(_Message, frozen=True):
    """Ports that the agent keeps free for workers: all that it has now."""

    free: tuple[Int, ...]


class Leaving(_Message, frozen=True):
    """The machine will be taken away in `in_s` seconds."""

    in_s: float
    why: str


class Probed(_Message, frozen=True):
    """The answer to `Probe`: the text that the agent read, and the name under which it wrote a file; or why not."""

    directory: str
    text: str = ""
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")] = ""
    why: str = ""
    unreachable: dict[str, str] = {}  # addresses that it cannot connect to, and why


class Listening(_Message, frozen=True):
    """The answer to `Listen`. Without a port it says why."""

    port: Int
    why: str = ""


class Reached(_Message, frozen=True):
    """The answer to `Reach`: the addresses that it cannot connect to, and why."""

    failed: dict[str, str]


class FetchTree(_Message, frozen=True):
    """Send the archive of an uploaded working directory from this position on. The answer is one `TreePart`."""

    digest: Digest
    begin: Annotated[int, Meta(ge=0, le=2**62)]


class SessionOutput(_Message, frozen=True):
    """What the command of a session has printed."""

    session: SessionId
    data: Annotated[bytes, Meta(max_length=SESSION_PART_BYTES)]


class SessionEnded(_Message, frozen=True):
    """The command of a session has ended, or could not be started."""

    session: SessionId
    code: Int
    why: Annotated[str, Meta(max_length=4096)] = ""


# Control plane to agent


class Welcome(_Message, frozen=True):
    """The agent is accepted. Grants a lease that begins at `clock_s` of its hello."""

    epoch: str  # random, new for each process of the control plane
    lease_s: float | None  # None: workers need no lease
    heartbeat_s: float  # interval between two `Renew`
    logs: dict[str, Int] = {}  # workers whose output is wanted, with the position to continue from
    credential: str = ""  # after a first join: the agent's own secret


class Refused(_Message, frozen=True):
    """The agent is not accepted. The connection is closed after this message."""

    why: str
    final: bool  # True: trying again does not help


class Renewed(_Message, frozen=True):
    """Grants a lease that begins at `clock_s`, the time of the request."""

    clock_s: float


class LogAck(_Message, frozen=True):
    """The control plane has the worker's output up to `position`."""

    worker: WorkerId
    position: Int


class Probe(_Message, frozen=True):
    """Do we share this directory, and can workers there connect to these addresses?

    The agent reads the control plane's file in the directory, writes one, and answers.
    """

    directory: str
    addresses: tuple[str, ...] = ()


class Listen(_Message, frozen=True):
    """Listen for a short while where workers listen, and say this text to whoever connects."""

    text: Annotated[str, Meta(max_length=64)]


class Reach(_Message, frozen=True):
    """Can workers there connect to these addresses of other agents, each of which says a text?"""

    others: dict[str, str]


class TreePart(_Message, frozen=True):
    """A part of an archive, or why there is none. The agent requests the next part when it has this one."""

    digest: Digest
    begin: Int
    size_bytes: Int = 0
    data: bytes = b""
    why: str = ""


class SessionOpen(_Message, frozen=True):
    """Run a command next to a worker, with its account, GPUs, directory and variables.

    Messages of sessions are not repeated: a session ends with its connection.
    """

    session: SessionId
    worker: WorkerId
    command: tuple[str, ...]
    tty: bool
    rows: Int
    columns: Int


class SessionInput(_Message, frozen=True):
    session: SessionId
    data: Annotated[bytes, Meta(max_length=SESSION_PART_BYTES)]


class SessionSize(_Message, frozen=True):
    session: SessionId
    rows: Int
    columns: Int


class SessionTaken(_Message, frozen=True):
    """A reader has the output up to `position`: the agent may send more."""

    session: SessionId
    position: Annotated[int, Meta(ge=0, le=2**62)]


class SessionClose(_Message, frozen=True):
    """Nobody reads it any more: end the command."""

    session: SessionId


class Start(_Part, frozen=True, tag_field="do", tag=True):
    """Start a worker. Does nothing if the agent knows the worker."""

    worker: WorkerId
    node: str
    gpu: Int
    command: tuple[str, ...]
    workdir: str
    env: dict[str, str]
    directory: str = ""  # its directory at the control plane, for an agent on the same machine
    grace_s: float = 10.0
    warm: bool = False
    tree: str = ""  # the digest of its working directory, if that was uploaded
    gpus: tuple[Int, ...] = ()  # the GPUs that it sees, in this order; empty: its own only
    secret_files: dict[str, str] = {}  # files that only it may read, by the variable that names the path
    waits_for_go: bool = False
    port: Int | None = None  # one of `Ports`, which the worker will listen on
    account: str = ""  # of the machine, under which it runs; empty: the agent's own
    may_be_root: bool = False  # the agent's own account may be root
    shared: bool = False  # jobs of other users run under the agent's own account, too

    def __repr__(self) -> str:
        return f"Start({self.worker!r}, {self.node!r}, {self.gpu})"  # the environment may contain secrets


class Stop(_Part, frozen=True, tag_field="do", tag=True):
    worker: WorkerId
    kill: bool = False


class Suspend(_Part, frozen=True, tag_field="do", tag=True):
    worker: WorkerId


class Wake(_Part, frozen=True, tag_field="do", tag=True):
    worker: WorkerId


class Warn(_Part, frozen=True, tag_field="do", tag=True):
    """Send the worker's command a signal: `USR1`."""

    worker: WorkerId
    signal: Annotated[str, Meta(max_length=16)]


class Go(_Part, frozen=True, tag_field="do", tag=True):
    """Let a worker that waits for it use its GPU."""

    worker: WorkerId


class WarmUp(_Part, frozen=True, tag_field="do", tag=True):
    """Prepare for warm starts."""


class Forget(_Part, frozen=True, tag_field="do", tag=True):
    """The control plane knows how the worker ended and has its output. Delete everything about it."""

    worker: WorkerId


Order = Start | Stop | Suspend | Wake | Warn | Go | WarmUp | Forget


class Command(_Message, frozen=True):
    """An order with its number. Numbers rise, not necessarily by one."""

    seq: Int
    order: Order


FromAgent = (
    AgentHello
    | Renew
    | Ack
    | Exited
    | LogChunk
    | UsageReport
    | Ports
    | Leaving
    | FetchTree
    | Probed
    | Listening
    | Reached
    | SessionOutput
    | SessionEnded
)
ToSession = SessionOpen | SessionInput | SessionSize | SessionTaken | SessionClose
ToAgent = Welcome | Refused | Renewed | LogAck | Command | TreePart | Probe | Listen | Reach | ToSession
AgentMessage = FromAgent | ToAgent

_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


def encode(message: AgentMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    _check_size(body)
    return body


def decode(body: bytes) -> AgentMessage:
    """Return the message in `body`. Raise WireError if it is malformed."""
    _check_size(body)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"malformed message: {str(error)[:300]}") from None


def _check_size(body: bytes) -> None:
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
