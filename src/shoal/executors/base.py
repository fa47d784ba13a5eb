"""The executor interface: it turns workers into processes on nodes and reports how they end.

`LocalExecutor` implements it for this machine. The interface passes plain values only and identifies a worker by its
id and its directory, so an executor may also forward the calls to other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.executors.logs import Line


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A machine that the executor can start workers on."""

    name: str
    gpus: int
    gpu_type: str
    #: True: the GPUs do not exist, and workers run on the CPU.
    virtual: bool
    #: Name or id of each GPU, for people.
    devices: tuple[str, ...] = ()
    rack: str = "rack0"
    domain: str = "domain0"
    #: Memory of each GPU. Virtual GPUs are assumed to have the default.
    gpu_memory_mb: float = 16_384.0
    #: What the workers of other nodes connect to.
    address: str = "127.0.0.1"
    #: True: its workers reach the control plane over the network and see none of its files.
    remote: bool = False


@dataclass(frozen=True, slots=True)
class NodeUp:
    """Workers can be started on the node."""

    node: NodeInfo


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """No connection. Its workers may go on; nothing can be started there."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """None of its workers can be alive. They have all been reported."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The machine will be taken away in `in_s` seconds. None: it stays after all."""

    node: str
    in_s: float | None
    why: str


NodeChange = NodeUp | NodeUnreachable | NodeLost | NodeLeaving


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The usage of a GPU at one moment: utilisation in per cent, and memory in use."""

    utilisation: float
    memory_mb: float


@dataclass(frozen=True, slots=True)
class OwnAccount:
    """The account of the executor. Where that is root, the worker runs only if `may_be_root`.

    `shared`: workers of other users run under it, too. The executor hides its own files where it can.
    """

    may_be_root: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class NamedAccount:
    """An account of the worker's machine. An executor that is neither root nor this account refuses the worker."""

    name: str


RunAs = OwnAccount | NamedAccount


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to start. Its environment may contain secrets and is not part of its repr."""

    worker: str
    #: Where the executor keeps the worker's files. No other worker uses it, before or after.
    directory: Path
    node: str
    #: Index of its own GPU on the node.
    gpu: int
    command: tuple[str, ...]
    workdir: str
    env: dict[str, str] = field(repr=False)
    #: How long the worker may take to end after `stop`.
    grace_s: float = 10.0
    #: The worker may start from a process that has already imported the training libraries.
    warm: bool = False
    #: The content of its working directory, if that was uploaded. It then starts in a copy instead of `workdir`.
    tree: str = ""
    #: The GPUs that it sees, in this order. Empty: its own only.
    gpus: tuple[int, ...] = ()
    #: Files that only it can read, by the variable of its environment that names the path.
    secret_files: dict[str, str] = field(default_factory=dict, repr=False)
    #: It prepares only: `SHOAL_GO` names a file that appears when `go` is called.
    waits_for_go: bool = False
    #: The account of its machine under which it runs.
    account: RunAs = OwnAccount(may_be_root=True)
    #: A port of `free_port` that it will listen on.
    port: int | None = None

    @property
    def visible_gpus(self) -> tuple[int, ...]:
        return self.gpus or (self.gpu,)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended: by itself with a code, by a signal, or unobserved (neither)."""

    worker: str
    code: int | None
    signal: str | None
    why: str
    #: False: it never started.
    began: bool = True
    #: True: it ended because it was asked to.
    asked_to_end: bool = False
    #: How long ago by a monotonic clock. None: unknown.
    ago_s: float | None = None
    #: True: its machine was lost. It was killed when the lease of its node ended, or it cannot be alive and nobody saw
    #: how it ended. The command did not fail.
    node_lost: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0


class Executor(Protocol):
    """Runs workers. All calls return at once, except `usage`, `logs` and `tail_position`.

    The executor promises:
    - Each worker that was started or adopted ends in exactly one call of `on_exit`, even if it could not be started.
    - Workers outlive the executor. A later executor takes them over with `adopt`.
    - After `on_exit` no process of the worker is left.

    Resizing is not part of this interface: workers and their coordinator do it over the wire.
    """

    name: str
    #: Receives the end of each worker, on the thread of the event loop. Set it before the first call.
    on_exit: Callable[[Exit], None]
    #: Receives each change of a node, on the same thread. An executor whose nodes never change does not call it.
    on_node: Callable[[NodeChange], None]

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The machines that this executor can start workers on now."""

    def awaited_nodes(self) -> tuple[NodeInfo, ...]:
        """Machines of an earlier executor that may come back, with workers that may be alive."""

    def start(self, worker: WorkerSpec) -> None:
        """Start a worker. If that fails, `on_exit` reports it with `began=False`."""

    def stop(self, worker: str, *, kill: bool = False) -> None:
        """Ask a worker to end and kill it after its grace period, or kill it at once. No process of it survives."""

    def suspend(self, worker: str) -> None:
        """Stop all processes of a worker without ending them. They keep their memory."""

    def wake(self, worker: str) -> None:
        """Let a suspended worker continue. Does nothing to a worker that runs."""

    def warn(self, worker: str, signal: str) -> None:
        """Send the worker's command a signal: `USR1`, one of those that `keeper.WARNINGS` has."""

    def go(self, worker: str) -> None:
        """Let a worker that was started with `waits_for_go` use its GPU."""

    def free_port(self, node: str) -> int:
        """A port of the node that nobody uses, for `WorkerSpec.port` of a worker that is started there next."""

    def adopt(self, worker: str, directory: Path) -> None:
        """Take over a worker that an earlier executor started. If it has ended, `on_exit` reports how."""

    def logs(self, directory: Path, begin: int, max_bytes: int = 256 * 1024) -> list[Line]:
        """Read whole lines of the worker's output from position `begin` on."""

    def tail_position(self, directory: Path, lines: int) -> int:
        """The position where the last `lines` lines of the worker's output begin."""

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        """The usage of each GPU by node and index, without those whose usage is unknown.

        It may take a while: call it in a separate thread.
        """

    def warm_up(self) -> None:
        """Prepare for warm starts, if that is possible."""

    def close(self) -> None:
        """Release the executor's own resources. Workers continue to run."""
