"""One training step: its kind, how far it has come, how it ended, and what it needs of the membership."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from shoal.torch.gradients import Sync
from shoal.torch.order import Part


class StepKind(Enum):
    REAL = auto()
    #: A newcomer runs one step before it joins. Nothing of it counts.
    REHEARSAL = auto()
    #: A newcomer contributes nothing; it receives state and applies the others' gradients to it.
    CATCH_UP = auto()
    #: The synchronization broke. The rest of the loop's body runs, and then the step is done again.
    VOID = auto()


@dataclass(slots=True)
class Step:
    """Its flags follow each other; a step that breaks becomes VOID, or is completed with the gradients it holds.

    | point of the step                     | synced | stepped | counted | resized, broken            |
    |---------------------------------------|--------|---------|---------|----------------------------|
    | before the end of its last backward   |        |         |         |                            |
    | its gradients are complete            | yes    |         |         |                            |
    | the optimizer step is applied         | yes    | yes     |         |                            |
    | completed in a recovery               | yes    | any     | yes     | resized                    |
    | several optimizers: after each sum    | yes    | any     | yes     |                            |
    | several optimizers: after a recovery  | yes    | any     | yes     | resized and broken         |
    | VOID                                  | any    | any     | any     | any: nothing of it is used |
    """

    kind: StepKind
    part: Part  # that was drawn last
    samples: int  # of this worker
    began_s: float
    size: int = 0  # samples of all workers, by which the job advances, even if the members change within it
    parts: list[Part] = field(default_factory=list)  # micro-batches drawn so far
    amounts: list[float] = field(default_factory=list)  # what each of them counts, if the loader weighs them
    whole: float | None = None  # what all of them count, if the script weighs them
    ahead: bool = False  # the script draws batches before it has used the former ones
    backwards: int = 0  # micro-batches whose backward is over
    syncs: int = 0  # how often its gradients were summed
    synced: bool = False  # its gradients are complete
    stepped: bool = False  # an optimizer step is applied
    counted: bool = False  # the membership has counted it already
    resized: bool = False  # the members changed within it: batch and learning rate follow after it
    broken: bool = False  # the members changed within it: a further backward pass makes it void
    updates: int = 0  # calls of optimizer steps, with several optimizers
    updates_of: list[int] = field(default_factory=list)  # how many of them each optimizer had
    generation: int = 0  # in which it was opened
    kept: bytes | None = None  # with several optimizers: schedulers and learning rates at its start
    undo: bytes | None = None  # `job.state` and learning rates at the break


class Outcome(Enum):
    """How the synchronization of a step ended."""

    DONE = auto()
    HELD = auto()  # it broke, and this worker holds the complete gradients
    LOST = auto()  # it broke without them


class Membership(Protocol):
    """What a step needs of the membership: a `Session`."""

    @property
    def outside_shoal(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def done(self) -> int: ...

    @property
    def retreated(self) -> bool: ...

    @property
    def rank(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def data_group(self) -> Any: ...

    @property
    def vote_group(self) -> Any: ...

    def summing(self, sync: Sync) -> tuple[Any, Sync]: ...

    def arrived(self, step: int) -> None: ...

    def applied(self) -> None: ...

    def wait(self, work: Any) -> bool: ...
