"""The engine interface: request machines from a cluster manager, run the agent on each, and return them.

An engine keeps no state on disk. It recognises its machines by their names in the cluster manager, which begin with
`shoal-HOMEID-`. After a restart, the first `poll` finds them again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class EngineError(Exception):
    """The engine could not do what was asked. The message says why and what to do."""


class EngineUnavailable(EngineError):
    """The engine is not installed or does not answer. Its machines may well be running."""


class RequestRefused(EngineError):
    """The engine does not accept this request. The same request is refused again."""


class MachineState(StrEnum):
    REQUESTED = "requested"  #: The request was sent and the engine has not confirmed it yet.
    PENDING = "pending"  #: The engine has the request in its queue.
    STARTING = "starting"  #: The machine was allocated and the agent does not run yet.
    UP = "up"  #: The agent command runs.
    LEAVING = "leaving"  #: The agent command still runs, and the machine goes away at `leaving_at_s`.
    GONE = "gone"  #: The machine was returned or lost.

    @property
    def is_coming(self) -> bool:
        """Whether the machine was requested and its agent does not run yet."""
        return self in (MachineState.REQUESTED, MachineState.PENDING, MachineState.STARTING)


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """What each machine of a request must have."""

    #: None: all GPUs of the machine, where the engine can grant that.
    gpus: int | None
    gpu_type: str | None = None
    #: Further options in the engine's own language, such as `--mem=64G` for sbatch.
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """What the engine runs on each machine.

    The arguments may contain `{dir}`, a private directory on the machine that holds `files`; `{state}`, a private
    directory that the command finds again when the engine restarts it there; `{agent}`, the name of the agent; and
    `{node}`, the engine's name of the node.

    The command also gets these variables:
    - SHOAL_ENGINE, SHOAL_ENGINE_ID and SHOAL_NODE, for people who look at the process.
    - SHOAL_GPU_TYPE, SHOAL_RACK, SHOAL_DOMAIN and SHOAL_ADDRESS, as far as the engine knows them.
    - SHOAL_LEAVING_FILE. The file appears when the engine announces that it takes the machine back. Its only line is
      the deadline in seconds of CLOCK_BOOTTIME, which does not depend on the machine's wall clock.

    A command that is killed by a signal is started again. A command that ends by itself ends the machine.
    """

    argv: tuple[str, ...]
    #: Secrets belong into `files`: other users of a machine can often read a process's environment or arguments.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Name and contents of each file. Only the owner can read them.
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("the agent command is empty")
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        for name in self.files:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise ValueError(f"{name!r} is no plain file name")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as the engine sees it."""

    #: The engine's own id: the Slurm job id or the name of the Ray actor.
    id: str
    #: The name of the agent that runs there.
    agent: str
    state: MachineState
    #: The engine's name of the node. Empty while none is allocated.
    node: str = ""
    gpus: int = 0
    gpu_type: str = ""
    rack: str = ""
    domain: str = ""
    #: The engine's own words, for example why the request is pending or how the machine was lost.
    reason: str = ""
    #: When the machine goes away, by `time.monotonic` of this process: wall clocks may be wrong.
    leaving_at_s: float | None = None
    #: False: the engine has lost contact with the node. The agent may still run there.
    responds: bool = True
    #: For GONE, and for PENDING once when the engine has taken a running machine back. True: the engine has ended all
    #: processes that ran there. False: some may still run.
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class NewMachine:
    """A machine that the engine could provide."""

    gpus: int
    #: None: the type is not known beforehand. It serves demand that names no type.
    gpu_type: str | None = None
    #: How many of these there are at most. None: the engine's queue decides.
    count: int | None = None


class Engine(Protocol):
    """Provides machines. One caller at a time uses an engine."""

    #: The product's name for messages, such as `Slurm`.
    title: str
    #: What the engine calls the id of a machine, such as `job`.
    id_word: str

    @property
    def clock_ahead_s(self) -> float | None:
        """The engine's wall clock minus that of this machine. None: it is not known."""

    async def version(self) -> str:
        """The engine's version, such as `22.05.8`. Raises EngineUnavailable if the engine does not answer."""

    async def offers(self, *, drained: Collection[str] = ()) -> list[NewMachine]:
        """What further machines the engine could provide, now or later. Preferred ones come first.

        `drained`: agents that a person drained. Under their names no machine is offered or requested.
        """

    async def check(self, what: MachineRequest) -> None:
        """Raise RequestRefused if the engine would refuse this request whatever machines are free."""

    async def request(
        self,
        what: MachineRequest,
        commands: Sequence[AgentCommand],
        *,
        avoid: Collection[str] = (),
        drained: Collection[str] = (),
    ) -> list[Machine]:
        """Request a machine for each command and return at once with those that the engine accepted, at least one.

        They belong to the first commands. A name in `avoid` is not given to an agent on another node, a name in
        `drained` to none.
        Raises RequestRefused or EngineUnavailable if the engine accepted none.
        """

    async def release(self, machine_id: str) -> None:
        """Return a machine, or withdraw its request. Does nothing if it is gone already."""

    async def poll(self) -> list[Machine]:
        """All machines that this home holds. A machine that is gone is in the list once, with the reason.

        Raises EngineUnavailable if the engine does not answer. The machines are then as they were.
        """

    async def detach(self) -> None:
        """Stop watching. The machines stay, and a later engine of the same home finds them."""

    async def close(self) -> None:
        """Return all machines, wait until they are gone, and release all resources. Raises EngineError if some stay."""


def machine_prefix(home_id: str) -> str:
    """What the names of this home's machines begin with."""
    if not re.fullmatch(r"[A-Za-z0-9]{1,32}", home_id):
        raise ValueError(f"a home id has up to 32 letters and digits, not {home_id!r}")
    return f"shoal-{home_id}-"


def describe_waiting(title: str, id_word: str, machines: Sequence[Machine]) -> str | None:
    """One sentence about the machines that were requested and are not up, for `why`. None: there are none.

    >>> describe_waiting("Slurm", "job", [Machine("4711", "slurm-1", MachineState.PENDING, reason="Priority")])
    '1 machine requested from Slurm; job 4711 is pending there (Priority)'
    """
    coming = [m for m in machines if m.state.is_coming]
    if not coming:
        return None
    shown = [
        f"{id_word} {m.id} is {m.state} there" + (f" ({m.reason})" if m.reason else "") for m in coming[:3]
    ]
    if len(coming) > 3:
        shown.append(f"{len(coming) - 3} more are not up yet")
    return f"{len(coming)} machine{'s'[: len(coming) > 1]} requested from {title}; " + ", ".join(shown)
