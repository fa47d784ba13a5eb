"""The collectives of a sharded model: their results, and that the death of the generation ends each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import torch
from shoal.torch.group import form_gloo, gather
from shoal.torch.sharding.private import Collectives
from shoal.torch.worker import Worker

MEMBERS = ("w0", "w1")


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """One group for each of two workers."""
    store = dist.HashStore()

    def form(worker: str) -> Any:
        gather(store, MEMBERS, worker)
        return form_gloo(store, MEMBERS, worker, "127.0.0.1", b"secret", "1 vote")

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        formed = list(pool.map(form, MEMBERS))
    yield formed
    while formed:
        formed.pop()  # the silent worker first: this ends what the other one has begun


COLLECTIVES: dict[str, Callable[[Collectives], Any]] = {
    "all_gather": lambda group: group.all_gather(torch.empty(4), torch.ones(2)),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.empty(2), torch.ones(4)),
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "broadcast": lambda group: group.broadcast(torch.ones(2), source=1),
    "exchange": lambda group: group.exchange(torch.ones(4), [2, 2], [2, 2]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_death_of_the_generation_ends_a_collective_that_waits_for_a_silent_worker(
    groups: list[Any], name: str
) -> None:
    worker = SimpleNamespace(interrupted=False)
    begun, results = threading.Event(), []

    def wait(work: Any) -> bool:
        begun.set()
        return Worker.wait(worker, work)  # type: ignore[arg-type]

    group = Collectives(groups[0], wait)
    thread = threading.Thread(target=lambda: results.append(COLLECTIVES[name](group)), daemon=True)
    thread.start()
    assert begun.wait(30)
    worker.interrupted = True
    thread.join(30)
    assert not thread.is_alive(), "it waits although its generation is dead"
    assert not results[0]
    assert group.broken


def test_each_worker_receives_its_part_of_a_sum(groups: list[Any]) -> None:
    def part_of(group: Any) -> list[float]:
        part = torch.empty(2)
        whole = torch.arange(4.0) + group.rank()
        assert Collectives(group, lambda work: bool(work.wait() or True)).reduce_scatter(part, whole)
        return part.tolist()

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        assert list(pool.map(part_of, groups)) == [[1.0, 3.0], [5.0, 7.0]]
