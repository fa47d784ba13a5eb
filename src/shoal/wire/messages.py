"""The messages between a job's coordinator and its workers, and how they are checked.

Both directions carry *snapshots*, not increments: a worker says how it stands (`Status`), the coordinator says
what is wanted of it (`Order`). Each has a sequence number and the newest wins, so a message that is lost, late,
doubled or overtaken does no harm: the next one says everything again.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

_T = typing.TypeVar("_T")

PROTOCOL = 3
"""Raised whenever a message changes its meaning; both ends refuse another number."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024


class WireError(Exception):
    """A message or a peer that does not keep to the protocol."""


class Phase(StrEnum):
    """How a worker stands."""

    STARTING = "starting"  # the script imports, builds its model, rehearses a step
    READY = "ready"  # waits to be taken into a generation
    ACTIVE = "active"  # takes part in the steps of its generation
    HALTED = "halted"  # its generation is dead; it holds its state and waits for the next one
    LEFT = "left"  # gave its place up at a switch, or paused
    FINISHED = "finished"  # all steps done
    FAILED = "failed"  # the script raised


class Kind(StrEnum):
    """Why a generation is formed, which decides how its members come into it."""

    FIRST = "first"  # no one holds state: rank 0 takes it from the script or a checkpoint
    SWITCH = "switch"  # agreed at a step boundary while the previous generation trains
    RECOVER = "recover"  # the previous generation is dead and its survivors stand halted
    PAUSE = "pause"  # no members: save the state and leave


@dataclass(frozen=True, slots=True)
class Plan:
    """One generation to come: its number, who is in it (in rank order) and where its state is."""

    number: int
    kind: Kind
    members: tuple[str, ...]
    previous: int = 0
    holders: tuple[str, ...] = ()  # members of the previous generation, in rank order: they hold the state
    addresses: dict[str, str] = field(default_factory=dict)  # where newcomers listen for the state
    resume: int = 0  # recover: the step all members go on from; who holds its gradients applies them first
    restore: str | None = None  # first: the checkpoint to begin from
    save: str | None = None  # pause: where to leave the state
    learners: tuple[
        str, ...
    ] = ()  # who of the previous generation was still being given the state, and leaves
    replaces: dict[str, str] = field(default_factory=dict)  # newcomer -> the member whose place it takes

    @property
    def newcomers(self) -> tuple[str, ...]:
        return tuple(m for m in self.members if m not in self.holders)


@dataclass(frozen=True, slots=True)
class Order:
    """Coordinator to worker: all that is wanted of it now."""

    seq: int
    dead: int = 0  # generations up to this number are dead: halt
    plan: Plan | None = None
    commit: bool = False  # all members have formed the plan's group: switch at the next boundary
    board: dict[str, str] = field(default_factory=dict)  # rendezvous entries of the plan, once complete
    signed: bool = False  # the worker's signature is known, do not repeat it
    first: bool = False  # the job has no state yet: no rehearsal, the script starts it
    checkpoint: int = 0  # how many checkpoints have been asked for so far
    stop: str | None = None  # end now, for this reason


@dataclass(frozen=True, slots=True)
class Status:
    """Worker to coordinator: how it stands now."""

    seq: int
    phase: Phase
    generation: int = 0
    members: tuple[str, ...] = ()
    step: int = 0  # steps done
    holds: bool = False  # halted: holds the complete gradients of step + 1
    torn: bool = False  # it is being given the state and has only a part of it
    away: bool = False  # its script is not in a step but evaluates, saves, or starts up
    formed: int = 0  # number of the plan whose group is built
    broken: int = 0  # number of the plan whose group could not be built
    arrived: int = 0  # the step whose synchronisation it has entered
    dead: int = 0  # it has stopped work in generations up to this number
    seen: int = 0  # the highest generation number it has heard of
    address: str = ""  # where it listens for state
    board: dict[str, str] = field(default_factory=dict)  # its rendezvous entries ...
    board_of: int = 0  # ... and for which plan
    signature: tuple[str, ...] | None = None
    saved: str | None = None  # pause: where the state is
    why: str | None = None  # failed: the traceback


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker to coordinator, first message on a connection, after authentication."""

    worker: str
    pid: int
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Report:
    """Worker to coordinator: measurements since the last report. Also a sign of life."""

    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    epochs: int = 0
    steps: int = 0  # in this report
    samples: float = 0.0  # of this worker, in this report
    seconds: float = 0.0  # from the end of the last report's last step to the end of this one's
    compute_s: float = 0.0
    sync_s: float = 0.0
    input_s: float = 0.0
    memory_bytes: int = 0
    workers: int = 0
    batch_size: int = 0
    values: dict[str, float] = field(default_factory=dict)  # last of each logged value
    notes: tuple[str, ...] = ()  # what the runtime did, for the job's log
    pause_s: float | None = None  # the pause that the last switch cost this worker
    pause_generation: int = 0
    saved: str | None = None  # a checkpoint that is now complete
    saved_step: int = 0


@dataclass(frozen=True, slots=True)
class Resize:
    """Client to the standalone launcher: have this many workers."""

    workers: int
    replace: tuple[str, ...] = ()
    fresh: bool = False  # move to all new workers


@dataclass(frozen=True, slots=True)
class Ask:
    """Client to the standalone launcher: one of `status`, `pause`, `resume`, `checkpoint`, `stop`."""

    what: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Launcher to client."""

    ok: bool
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)


Message = Hello | Status | Report | Order | Resize | Ask | Answer
_TYPES: dict[str, type] = {t.__name__: t for t in (Hello, Status, Report, Order, Resize, Ask, Answer)}


def encode(message: Message) -> bytes:
    body = json.dumps(
        {"type": type(message).__name__, **_plain(message)}, separators=(",", ":"), allow_nan=True
    ).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return body


def decode(body: bytes) -> Message:
    """The message in `body`, or WireError: unknown type, unknown or missing field, wrong type of value."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("type") not in _TYPES:
        raise WireError("message has no known type")
    kind = _TYPES[raw.pop("type")]
    return typing.cast(Message, _build(kind, raw))


def to_plain(value: Any) -> Any:
    """A dataclass as JSON-ready values."""
    return _plain(value)


def from_plain(kind: type[_T], raw: Any) -> _T:
    """The inverse of `to_plain`, checked."""
    return typing.cast(_T, _build(kind, raw))


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [_plain(v) for v in value]
    if kind is dict:
        return {k: _plain(v) for k, v in value.items()}
    if is_dataclass(kind):
        return {name: _plain(getattr(value, name)) for name in _names(kind)}
    return value


_SCALARS = frozenset({int, float, str, bool, type(None)})


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


class _Wrong(Exception):
    """A value that does not fit; its place is put together on the way out."""

    def __init__(self, reason: str, place: str = "") -> None:
        self.reason, self.place = reason, place


Check = Callable[[Any], Any]
"""A value as the type it should have, or _Wrong."""


def _build(kind: type, raw: Any) -> Any:
    try:
        return _check_of(kind)(raw)
    except _Wrong as wrong:
        raise WireError(f"{kind.__name__}{wrong.place}: {wrong.reason}") from None


@cache
def _check_of(hint: Any) -> Check:
    """Made once per type: messages are checked twice a second and worker."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (types.UnionType, typing.Union):
        inner = _check_of(next(a for a in args if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _check_tuple(_check_of(args[0]))
    if origin is dict:
        return _check_dict(_check_of(args[1]))
    if is_dataclass(hint):
        return _check_fields(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _check_enum(hint)
    return _check_scalar(hint)


def _check_fields(kind: type) -> Check:
    hints = typing.get_type_hints(kind)
    checks = {f.name: _check_of(hints[f.name]) for f in fields(kind)}
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def check(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise _Wrong("expected an object")
        values = {}
        for name, value in raw.items():
            if name not in checks:
                raise _Wrong(f"unknown field {name[:60]!r}")
            try:
                values[name] = checks[name](value)
            except _Wrong as wrong:
                raise _Wrong(wrong.reason, f".{name}{wrong.place}") from None
        for name in needed:
            if name not in values:
                raise _Wrong(f"field {name!r} is missing")
        return kind(**values)

    return check


def _check_tuple(inner: Check) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Wrong("expected a list")
        return tuple([inner(v) for v in value])

    return check


def _check_dict(inner: Check) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong("expected an object")
        result = {}
        for key, item in value.items():
            try:
                result[key] = inner(item)
            except _Wrong as wrong:
                raise _Wrong(wrong.reason, f"[{key[:40]!r}]{wrong.place}") from None
        return result

    return check


def _check_enum(kind: type[StrEnum]) -> Check:
    known = {str(m): m for m in kind}

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise _Wrong(f"{str(value)[:40]!r} is not one of {list(known)}")
        return known[value]

    return check


def _check_scalar(hint: Any) -> Check:
    def check(value: Any) -> Any:
        kind = type(value)
        if kind is int and hint in (int, float) and not -(2**63) <= value < 2**63:
            raise _Wrong("number out of range")
        if hint is float and kind in (int, float):
            return float(value)
        if kind is hint and kind in _SCALARS:
            return value
        raise _Wrong(f"expected {getattr(hint, '__name__', hint)}, got {kind.__name__}")

    return check
