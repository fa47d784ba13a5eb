"""Checkpoints and the checked mode by themselves."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from fakes import FakeSession, make_order, make_replica

import torch
from shoal.torch.checked import StateCheck
from shoal.torch.checkpoint import Checkpoints
from shoal.torch.meter import Meter
from shoal.torch.order import Position
from shoal.torch.replica import Replica
from shoal.torch.same_weights import Weights, digest, first_difference, weights_of
from shoal.torch.state_files import StateFiles


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
        self.slept_s: list[float] = []
        self.checkpoints = Checkpoints(
            *(self.session, self.replica, self.order, self.steps, self.meter),
            files=StateFiles(note=self.meter.note),
            sleep=self.sleep,
            path=str(path) if path else None,
            every_s=every_s,
            clock=self.clock,
        )

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.while_asleep()

    def while_asleep(self) -> None:
        raise AssertionError("it must not wait")


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


def test_a_pause_waits_until_its_state_can_be_saved_and_saves_it_nowhere_else(tmp_path: Path):
    bench = Bench(tmp_path / "c.pt")
    assert bench.checkpoints.save_for_pause(None) == str(tmp_path / "c.pt")
    place = tmp_path / "not" / "mounted" / "paused.pt"
    bench.while_asleep = lambda: len(bench.slept_s) == 5 and place.parent.mkdir(parents=True)
    shm = set(Path("/dev/shm").iterdir())
    assert bench.checkpoints.save_for_pause(str(place)) == str(place)
    assert bench.slept_s == [1, 2, 4, 8, 15]
    assert place.exists()
    assert not [p for p in set(Path("/dev/shm").iterdir()) - shm if "paused" in p.name]
    assert bench.session.reported[-2:] == [("away", True), ("away", False)]


def test_a_missing_directory_is_named_and_not_made(tmp_path: Path):
    bench = Bench(tmp_path / "absent" / "c.pt")
    assert not bench.checkpoints.save()
    assert "there is no such directory; make it first" in bench.meter.notes[-1]
    assert str(tmp_path / "absent") in bench.meter.notes[-1]
    assert list(tmp_path.iterdir()) == []


class Sum:
    """A group of threads: the sum waits for all of them."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors, self.lock = threading.Barrier(size), [], threading.Lock()

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        with self.lock:
            self.tensors.append(tensors[0].clone())
        self.barrier.wait(30)
        tensors[0].copy_(sum(self.tensors))


def meeting_of(session: FakeSession) -> MagicMock:
    """All members have the same values."""
    meeting = MagicMock()
    meeting.exchange = lambda point, make: [make()] * session.world_size
    return meeting


def compared(seeds: list[int], **options) -> list[str]:
    """What the checks of so many members note or raise."""
    group, found = Sum(len(seeds)), []

    def check(replica: Replica) -> None:
        session = FakeSession(world_size=len(seeds), vote_group=group)
        note = lambda text: found.append(text)  # noqa: E731
        test = StateCheck(session, replica, make_order(session), meeting_of(session), note, enabled=True)
        test.expect()
        try:
            test.run_if_due()
            test.run_if_due()  # once per generation
        except RuntimeError as error:
            found.append(str(error))

    replicas = [make_replica(seed) for seed in seeds]  # here: all threads have one random generator
    threads = [threading.Thread(target=check, args=(replica,)) for replica in replicas]
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
    check = StateCheck(
        session, make_replica(), order, meeting_of(session), session.reported.append, enabled=True
    )
    check.expect(after=1)
    check.run_if_due()
    session.contributors, session.done = (0, 1), 1
    check.run_if_due()
    assert session.reported == []
    session.done = 2
    with pytest.raises(RuntimeError, match="differ"):  # the fake group has only one of the two members
        check.run_if_due()


def checked(replicas: list[Replica], **options) -> list[str]:
    """What a check of the first of these members notes or raises. It knows what the others have."""
    session = FakeSession(world_size=len(replicas), vote_group=Unequal())
    meeting = MagicMock()
    meeting.exchange = lambda point, make: [weights_of(r.state) for r in replicas]
    order, found = make_order(session), session.reported
    check = StateCheck(session, replicas[0], order, meeting, found.append, enabled=False, **options)
    try:
        check.run_if_due()
    except RuntimeError as error:
        found.append(str(error))
    return [text for text in found if isinstance(text, str)]


class Unequal:
    """The other members have other weights, and nothing else that differs."""

    def allreduce(self, tensors: list[torch.Tensor]) -> MagicMock:
        half = len(tensors[0]) // 2  # then come the squares
        tensors[0].mul_(2)
        tensors[0][half - 1] += 1
        return MagicMock()


def test_different_weights_are_an_error():
    (found,) = checked([make_replica(1), make_replica(2)])
    assert "parameter weight differs between the workers w0 and w1: something has changed it" in found


@pytest.mark.parametrize("reason", ["optimizer", "sync"])
def test_weights_that_may_differ_by_rounding_are_only_noted(reason: str):
    replicas = [make_replica(1), make_replica(2)]
    if reason == "optimizer":
        replicas[0].state.optimizers = (torch.optim.Adafactor(replicas[0].state.model.parameters()),)
    (found,) = checked(replicas, own_sync=reason == "sync")
    assert "parameter weight differs between the workers w0 and w1: unless the optimizer" in found


def test_weights_are_compared_between_workers_of_the_same_hardware():
    def weights(hardware: str, value: bytes) -> Weights:
        return Weights(hardware, {"parameter a": b"same", "parameter b": value})

    names = ["w0", "w1", "w2"]
    assert first_difference(names, [weights("A", b"1"), weights("B", b"2"), weights("A", b"1")]) is None
    found = first_difference(names, [weights("A", b"1"), weights("B", b"2"), weights("B", b"3")])
    assert found == "parameter b differs between the workers w1 and w2"


@pytest.mark.parametrize("where", ["a parameter", "optimizer state"])
def test_the_digest_of_weights_shows_a_change_of_any_tensor(where: str):
    replica = make_replica(1)
    model, optimizer = replica.state.model, replica.state.optimizers[0]
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizer.step()
    before, weights = digest(replica.state), weights_of(replica.state)
    assert digest(replica.state) == before
    with torch.no_grad():
        changed = model.bias if where == "a parameter" else optimizer.state[model.bias]["momentum_buffer"]
        changed.mul_(1.5)
    assert digest(replica.state) != before
    found = first_difference(["w0", "w1"], [weights, weights_of(replica.state)])
    name = "parameter bias" if where == "a parameter" else "'momentum_buffer' of parameter bias"
    assert found == f"{name} differs between the workers w0 and w1"
