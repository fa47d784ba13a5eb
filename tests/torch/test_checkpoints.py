"""Checkpoints and the checked mode by themselves."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes import FakeSession, make_order, make_replica

import torch
from shoal.torch.checked import StateCheck
from shoal.torch.checkpoint import Checkpoints
from shoal.torch.meter import Meter
from shoal.torch.order import Position


@dataclass
class FakeSteps:
    counts: bool = True
    position: Position = field(default_factory=lambda: Position(1, 8, 14))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    def __init__(self, path: Path | None, every_s: float | None = None, seed: int = 0) -> None:
        self.session, self.steps, self.meter, self.clock = FakeSession(), FakeSteps(), Meter(), Clock()
        self.replica, self.order = make_replica(seed), make_order(self.session)
        self.checkpoints = Checkpoints(
            *(self.session, self.replica, self.order, self.steps, self.meter),
            path=str(path) if path else None,
            every_s=every_s,
            clock=self.clock,
        )


def test_what_was_saved_is_restored_with_the_position_of_the_applied_step(tmp_path: Path):
    saved, loaded = Bench(tmp_path / "c.pt", seed=1), Bench(tmp_path / "c.pt", seed=2)
    assert saved.checkpoints.save()
    assert saved.session.reported == [("away", True), ("away", False)]
    assert list(saved.meter.saved) == [(str(tmp_path / "c.pt"), 14)]
    loaded.checkpoints.load_if_new()
    assert loaded.order.position == Position(1, 8, 14)
    assert loaded.replica.state.digest() == saved.replica.state.digest()
    loaded.replica.state.model.weight.data.zero_()
    loaded.checkpoints.load_if_new()
    assert not loaded.replica.state.model.weight.any(), (
        "only a script that has done nothing continues from it"
    )


def test_only_rank_0_writes_and_only_in_steps_that_count(tmp_path: Path):
    bench = Bench(tmp_path / "c.pt")
    bench.session.rank = 1
    assert bench.checkpoints.save()
    bench.session.rank, bench.steps.counts = 0, False
    assert bench.checkpoints.save()
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_it_says_so():
    bench = Bench(None)
    assert not bench.checkpoints.save()
    assert "nowhere to write" in bench.meter.notes[0]


def test_checkpoints_are_due_by_the_interval_and_by_request(tmp_path: Path):
    bench = Bench(tmp_path / "c.pt", every_s=60.0)
    due = []
    for now_s, asked in ((150.0, 0), (161.0, 0), (200.0, 0), (200.0, 1), (200.0, 1), (261.0, 1)):
        bench.clock.now_s, bench.session.checkpoints_asked = now_s, asked
        bench.checkpoints.save_if_due()
        due.append(len(bench.meter.saved))
    assert due == [0, 1, 1, 2, 2, 3]


def test_a_pause_saves_elsewhere_if_its_place_cannot_be_written(tmp_path: Path):
    bench = Bench(tmp_path / "c.pt")
    assert bench.checkpoints.save_for_pause(None, "job") == str(tmp_path / "c.pt")
    (tmp_path / "file").touch()
    place = Path(bench.checkpoints.save_for_pause(str(tmp_path / "file" / "below"), "some-job"))
    assert place.parent == Path("/dev/shm")
    place.unlink()


class Sum:
    """A group of threads: the sum waits for all of them."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors, self.lock = threading.Barrier(size), [], threading.Lock()

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        with self.lock:
            self.tensors.append(tensors[0].clone())
        self.barrier.wait(30)
        tensors[0].copy_(sum(self.tensors))


def compared(seeds: list[int], **options) -> list[str]:
    """What the checks of so many members note or raise."""
    group, found = Sum(len(seeds)), []

    def check(seed: int) -> None:
        session = FakeSession(world_size=len(seeds), vote_group=group)
        note = lambda text: found.append(text)  # noqa: E731
        test = StateCheck(session, make_replica(seed), make_order(session), note, enabled=True)
        test.expect()
        try:
            test.run_if_due()
            test.run_if_due()  # once per generation
        except RuntimeError as error:
            found.append(str(error))

    threads = [threading.Thread(target=check, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("seeds", [[1, 1], [1, 1, 1]])
def test_equal_states_are_verified(seeds: list[int]):
    assert set(compared(seeds)) == {
        f"generation 1: state verified bit for bit on {len(seeds)} members",
    }


def test_different_states_are_an_error_on_all_members():
    found = compared([1, 1, 2])
    assert len(found) == 3
    assert all("the members' states differ" in text for text in found)


def test_a_comparison_waits_for_newcomers_and_for_the_step_after_a_recovery():
    session = FakeSession(world_size=2, contributors=(0,), next_contributors=(0, 1), vote_group=Sum(1))
    order = make_order(session)
    check = StateCheck(session, make_replica(), order, session.reported.append, enabled=True)
    check.expect(after=1)
    check.run_if_due()
    session.contributors = (0, 1)
    order.advance(8)
    check.run_if_due()
    assert session.reported == []
    order.advance(8)
    with pytest.raises(RuntimeError, match="differ"):  # the fake group has only one of the two members
        check.run_if_due()
