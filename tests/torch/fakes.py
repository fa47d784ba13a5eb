"""Stand-ins for the collaborators of one part of a job."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from shoal.torch.data_order import Batches, DataOrder
from shoal.torch.gradients import sum_of_one
from shoal.torch.order import BatchRule
from shoal.torch.replica import Replica
from shoal.torch.state import StateBox
from torch import nn


@dataclass
class FakeSession:
    """A membership that the test sets, and a record of what was reported to it."""

    name: str = "w0"
    rank: int = 0
    world_size: int = 1
    generation: int = 1
    contributors: tuple[int, ...] = (0,)
    next_contributors: tuple[int, ...] = (0,)
    on_gpu: bool = False
    retreated: bool = False
    interrupted: bool = False
    sends_sums: bool = False
    checkpoints_asked: int = 0
    outside_shoal: bool = False
    done: int = 0
    raises: int = 0  # the flag it raises in a vote
    works: bool = True  # whether collectives complete
    data_group: Any = None
    vote_group: Any = None
    links: list[Any] = field(default_factory=list)
    coming: Any = None
    receiver: Any = None
    lock: Any = field(default_factory=lambda: threading.Condition(threading.RLock()))
    reported: list[Any] = field(default_factory=list)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(f"w{rank}" for rank in range(self.world_size))

    @property
    def growing(self) -> bool:
        return self.contributors != self.next_contributors

    @property
    def relays(self) -> bool:
        return self.growing and not self.on_gpu

    def summing(self, sync):
        return self.data_group, sync

    def coming_links(self, flag: int):
        return self.coming if flag else None

    def release_links(self) -> None:
        self.links.clear()

    def wait(self, work: Any) -> bool:
        return self.works

    def wait_for(self, ready) -> Any:
        value = ready()
        assert value, "it would wait forever"
        return value

    def flag(self) -> int:
        return self.raises

    def agree(self, flag: int) -> None:
        self.reported.append(("agree", flag))

    def applied(self) -> None:
        self.done += 1

    def arrived(self, step: int) -> None:
        self.reported.append(("arrived", step))

    def set_away(self, away: bool) -> bool:
        self.reported.append(("away", away))
        return False

    def state_complete(self, step: int) -> None:
        self.reported.append(("complete", step))


class FakeGroup:
    """A group whose other members add these tensors to each sum."""

    def __init__(self, *others: torch.Tensor) -> None:
        self.others, self.calls = others, 0

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.calls += 1
        for other in self.others:
            tensors[0].add_(other)
        return sum_of_one(self, tensors[0])


class FakeTwin(FakeGroup):
    """A group whose other member is at the same place and adds a number to each gradient."""

    def __init__(self, other: float, gradients: int) -> None:
        super().__init__()
        self.other, self.gradients = other, gradients

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.calls += 1
        tensors[0][: self.gradients].add_(self.other)
        tensors[0][self.gradients :].mul_(2)
        return sum_of_one(self, tensors[0])


class FakeSource:
    def __init__(self, length: int = 10**9) -> None:
        self.length, self.replanned = length, 0

    def available(self, epoch: int, cursor: int, count: int) -> int:
        return max(0, min(count, self.length - cursor))

    def peek(self, cursor: int) -> int:
        return cursor

    def replan(self) -> None:
        self.replanned += 1


def make_order(session: FakeSession, length: int | None = 100, **options: Any) -> DataOrder:
    """A data order of batches of 8. Notes are in `session.reported`."""
    order = DataOrder(session, seed=0, note=session.reported.append)
    rule = BatchRule(
        8,
        options.pop("max_batch_size", None),
        options.pop("lr_rule", "linear"),
        warmup_steps=options.pop("warmup_steps", 20),
    )
    order.read(Batches(rule, length, **options), FakeSource())
    return order


def make_replica(seed: int = 0, lr: float = 0.1) -> Replica:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    replica = Replica(StateBox())
    replica.wrap([model], [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)])
    return replica
