"""Messages between a job's coordinator and its workers.

Both directions carry *snapshots*, not increments: a worker reports its whole status (`Status`), and the coordinator
sends everything it wants of the worker (`Order`). Each message has a sequence number and the newest one wins. A
message that is lost, late, duplicated or reordered therefore does no harm: the next one repeats everything.

On the wire a message is one JSON object, `{"type": "Status", ...fields}`. Decoding is strict: an unknown type or
field, a missing field and a value of the wrong type raise `WireError`.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from shoal.wire.previous import for_previous

PROTOCOL = 4
"""Raised whenever a message changes its meaning. Both ends refuse another number."""

PEER_PROTOCOL = 2
"""Raised whenever workers send each other something else. No generation has workers of two numbers: after an upgrade,
the control plane lets those of the earlier version save their state and leave."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A signed 64-bit integer. JSON allows any number of digits; these values go into databases and arrays."""


class WireError(Exception):
    """A message or a peer violates the protocol."""


class Phase(StrEnum):
    """The phase a worker is in."""

    STARTING = "starting"  # the script imports, builds its model, rehearses a step
    READY = "ready"  # waits to join a generation
    ACTIVE = "active"  # takes part in the steps of its generation
    HALTED = "halted"  # its generation is dead; it keeps its state and waits for the next generation
    LEFT = "left"  # left the job at a switch, or paused
    FINISHED = "finished"  # all steps are done
    FAILED = "failed"  # the script raised an exception


class Kind(StrEnum):
    """Why a generation is formed. It decides how its members enter it."""

    FIRST = "first"  # no worker holds state: rank 0 takes it from the script or a checkpoint
    SWITCH = "switch"  # agreed at a step boundary while the previous generation trains
    RECOVER = "recover"  # the previous generation is dead and its survivors are halted
    PAUSE = "pause"  # no members: save the state and leave


class Plan(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The next generation: its number, its members in rank order, and where the state is."""

    number: Int
    kind: Kind
    members: tuple[str, ...]
    previous: Int = 0
    holders: tuple[str, ...] = ()  # members of the previous generation that hold the state, in rank order
    addresses: dict[str, str] = {}  # where newcomers listen for the state
    resume: Int = (
        0  # recover: the step all members continue from; those that hold its gradients apply them first
    )
    restore: str | None = None  # first: the checkpoint to start from
    save: str | None = None  # pause: where to save the state
    learners: tuple[str, ...] = ()  # members of the previous generation that leave with only partial state
    replaces: dict[str, str] = {}  # newcomer -> the member that it replaces
    group: Int = 1  # so many members share one sharded model: the member of rank r has shard r % group

    @property
    def newcomers(self) -> tuple[str, ...]:
        return tuple(m for m in self.members if m not in self.holders)


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    pass


class Order(_Message, frozen=True):
    """Coordinator to worker: everything that the coordinator wants of it now."""

    seq: Int
    dead: Int = 0  # generations up to this number are dead: halt
    plan: Plan | None = None
    commit: bool = False  # all members have formed the plan's group: switch at the next boundary
    board: dict[str, str] = {}  # rendezvous entries of the plan, once complete
    signed: bool = False  # the coordinator knows the worker's signature: do not send it again
    first: bool = False  # the job has no state yet: skip the rehearsal, the script creates the state
    fresh: bool = False  # with `first`: there is no checkpoint either, the job begins
    lead: bool = False  # with `first`: this worker is to be rank 0
    checkpoint: Int = 0  # number of checkpoints requested so far
    stop: str | None = None  # end now, for this reason


class Status(_Message, frozen=True):
    """Worker to coordinator: its state now."""

    seq: Int
    phase: Phase
    generation: Int = 0
    members: tuple[str, ...] = ()
    step: Int = 0  # steps done
    holds: bool = False  # halted: it holds the complete gradients of step + 1
    partial: bool = field(default=False, name="torn")  # it has received only part of the state
    away: bool = False  # its script is not in a step: it evaluates, saves, or starts up
    formed: Int = 0  # number of the plan whose group is built
    broken: Int = 0  # number of the plan whose group could not be built
    arrived: Int = 0  # the step whose synchronisation it has entered
    exchanges: Int = 0  # exchanges of the script that it has entered in this generation, while it trains
    dead: Int = 0  # it has stopped working in generations up to this number
    seen: Int = 0  # the highest generation number it has received
    address: str = ""  # where it listens for state
    board: dict[str, str] = {}  # its rendezvous entries ...
    board_of: Int = 0  # ... and the plan they belong to
    signature: tuple[str, ...] | None = None
    saved: str | None = None  # pause: where the state is
    why: str | None = None  # failed: the traceback; finished: where it stopped, if before its last epoch


class Hello(_Message, frozen=True):
    """Worker to coordinator: the first message on a connection, after authentication."""

    worker: str
    pid: Int
    protocol: Int = PROTOCOL


class Report(_Message, frozen=True):
    """Worker to coordinator: measurements since the last report. Also serves as a heartbeat."""

    step: Int = 0
    total_steps: Int = 0
    epoch: Int = 0
    epochs: Int = 0
    steps: Int = 0  # in this report
    samples: float = 0.0  # of this worker, in this report
    seconds: float = 0.0  # from the end of the last report's last step to the end of this one's
    compute_s: float = 0.0
    sync_s: float = 0.0
    input_s: float = 0.0
    memory_bytes: Int = 0
    workers: Int = 0
    batch_size: Int = 0
    values: dict[str, float] = {}  # the last of each logged value
    notes: tuple[str, ...] = ()  # what the runtime did, for the job's log
    pause_s: float | None = None  # how long the last switch paused this worker
    pause_generation: Int = 0
    saved: str | None = None  # a checkpoint that is now complete
    saved_step: Int = 0


class StoreFile(_Message, frozen=True):
    """Worker to control plane: frames with the bytes of a file of the job follow, an empty one, and `FileEnd`."""

    location: str


class FetchFile(_Message, frozen=True):
    """Worker to control plane: send this file. The answer is `FileAnswer`, then frames as after `StoreFile`."""

    location: str


class CheckFile(_Message, frozen=True):
    """Worker to control plane: is this file there, with this size and this end?"""

    location: str
    size_bytes: Int
    tail_sha256: str


class FileEnd(_Message, frozen=True):
    """All bytes of a file have been sent."""

    size_bytes: Int
    sha256: str


class FileAnswer(_Message, frozen=True):
    """Control plane to worker: the answer to the three requests above."""

    ok: bool
    why: str = ""


class Resize(_Message, frozen=True):
    """Client to the standalone launcher: change the number of workers."""

    workers: Int
    replace: tuple[str, ...] = ()
    fresh: bool = False  # replace all workers by new ones


class Ask(_Message, frozen=True):
    """Client to the standalone launcher: one of `status`, `pause`, `resume`, `checkpoint`, `stop`."""

    what: str


class Answer(_Message, frozen=True):
    """Standalone launcher to client."""

    ok: bool
    text: str = ""
    data: dict[str, Any] = {}


Message = (
    Hello | Status | Report | Order | Resize | Ask | Answer
    | StoreFile | FetchFile | CheckFile | FileEnd | FileAnswer
)  # fmt: skip


def encode(message: Message, protocol: int = PROTOCOL) -> bytes:
    # json, not msgspec.json: msgspec writes NaN as null, and a logged loss may be NaN.
    raw = msgspec.to_builtins(message)
    body = json.dumps(raw if protocol == PROTOCOL else for_previous(raw), separators=(",", ":")).encode()
    _check_size(body)
    return body


def decode(body: bytes) -> Message:
    """Return the message in `body`. Raise WireError if it is malformed."""
    _check_size(body)
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from None
    try:
        message: Message = msgspec.convert(raw, Message)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"malformed message: {str(error)[:300]}") from None
    return message


def _check_size(body: bytes) -> None:
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
