"""The data order and the loader by themselves."""

from __future__ import annotations

import itertools

import pytest
from fakes import FakeSession, FakeSource, make_order

import torch
from shoal.torch.data_order import Batches, DataOrder
from shoal.torch.loader import Loader
from shoal.torch.meter import Meter
from shoal.torch.order import BatchRule, Position


def test_all_workers_parts_make_up_each_step():
    orders = [make_order(FakeSession(rank=r, contributors=(0, 1, 2)), length=20) for r in range(3)]
    seen: list[int] = []
    while not orders[0].exhausted():
        for order in orders:
            seen += [i for part in order.parts() for i in range(part.begin, part.end)]
            order.advance(order.step_samples())
    assert sorted(seen) == list(range(20))
    assert {o.position.step for o in orders} == {3}


def test_parts_ahead_follow_newcomers_that_get_their_part_after_the_next_step():
    session = FakeSession(contributors=(0,), next_contributors=(0, 1))
    order = make_order(session, length=24)
    order.replan((0, 1))
    parts = [(epoch, part.begin, part.end) for epoch, part in itertools.islice(order.ahead(), 4)]
    assert parts == [(0, 0, 8), (0, 8, 12), (0, 16, 20), (1, 0, 4)]


def test_a_newcomer_that_receives_the_state_has_no_part():
    session = FakeSession(rank=1, contributors=(0,), next_contributors=(0, 1))
    assert [part.weight for part in make_order(session).parts()] == [0.0]


def test_the_batch_and_the_learning_rate_follow_the_contributors():
    session = FakeSession(contributors=(0, 1))
    order = make_order(session, max_batch_size=16, warmup_steps=0)
    order.resized()
    assert order.batch_size == 16
    assert order.lr_factor() == 2.0
    assert "global batch 16 with 2 workers" in session.reported[0]


def test_a_batch_that_changes_without_the_learning_rate_is_told_once():
    session = FakeSession(contributors=(0, 1))
    order = make_order(session, max_batch_size=24, lr_rule="none")
    order.resized()
    assert session.reported == ["step 0: global batch 16 with 2 workers; the learning rate is unchanged"]
    session.contributors = (0, 1, 2)
    order.resized()
    newcomer = FakeSession(contributors=(0, 1, 2, 3))
    other = make_order(newcomer, max_batch_size=24, lr_rule="none")
    other.adopt(order.facts())
    session.contributors = (0, 1, 2, 3)
    order.resized()
    other.resized()
    assert len(session.reported) == 2, "the fourth worker does not change the batch"
    assert newcomer.reported == []


def test_a_loader_that_is_made_after_training_began_follows_the_contributors_and_the_checkpoint():
    session = FakeSession(contributors=(0, 1))
    rule = BatchRule(8, 64, warmup_steps=0)
    late = DataOrder(session, seed=0, note=session.reported.append)
    late.resized()  # at the beginning of `job.epochs`
    late.read(Batches(rule, 100), FakeSource())
    assert late.lr_factor() == 2.0
    assert "global batch 16 with 2 workers" in session.reported[0]
    again = DataOrder(FakeSession(contributors=(0, 1)), seed=0, note=print)
    again.adopt(late.facts())
    again.read(Batches(BatchRule(8, 64, warmup_steps=0), 100), FakeSource())
    assert again.lr_factor() == 2.0


def test_progress_counts_the_steps_of_all_epochs():
    order = make_order(FakeSession(), length=20)
    order.epochs = 3
    assert order.progress()["total_steps"] == 9
    order.advance(8)
    assert order.progress() == {
        "step": 1,
        "total_steps": 9,
        "epoch": 0,
        "epochs": 3,
        "workers": 1,
        "batch_size": 8,
    }
    assert DataOrder(FakeSession(), 0, print).progress()["total_steps"] == 0


def test_a_script_that_counts_no_epochs_is_not_at_its_last_step_all_the_time():
    order = make_order(FakeSession(), length=20)
    order.advance(8)
    assert (order.progress()["step"], order.progress()["total_steps"]) == (1, 0)


def test_facts_carry_the_position_and_the_rule():
    one, other = make_order(FakeSession(), max_batch_size=64), make_order(FakeSession(), max_batch_size=64)
    one.advance(8)
    one.rule.resize(4, step=1)
    facts = one.facts()
    one.advance(8)
    other.adopt(facts)
    assert other.position == Position(0, 8, 1)
    assert other.rule.goal == 4.0


def test_within_an_epoch_other_data_are_refused_and_at_its_end_they_are_not():
    facts = make_order(FakeSession(), length=20).facts()
    facts["position"] = Position(2, 8, 31)
    with pytest.raises(RuntimeError, match="within epoch 2: the data set had 20 samples and has 30 now"):
        make_order(FakeSession(), length=30).restore(facts, "c.pt")
    facts["position"] = Position(2, 20, 32)
    order = make_order(FakeSession(), length=30)
    order.restore(facts, "c.pt")
    assert order.position == Position(3, 0, 32)


class FakeDriver:
    """Ends a pass after some boundaries; advances the position as steps would."""

    def __init__(self, order: DataOrder, boundaries: int = 10**9) -> None:
        self.order, self.boundaries = order, boundaries
        self.rehearsing = False
        self.calls: list[str] = []
        self.size = 0

    def begin_pass(self) -> None:
        self.calls.append("begin")

    def check_pass(self) -> None:
        self.calls.append("check")

    def end_pass(self) -> None:
        self.calls.append("end")

    def settle(self, asked: bool) -> bool:
        if asked:
            self.order.advance(self.size)
        return True

    def boundary(self) -> bool:
        self.boundaries -= 1
        return self.boundaries >= 0

    def open_step(self, part, first: bool, samples: int) -> None:
        self.size = self.order.step_samples() if first else self.size
        self.calls.append(f"open {samples}")

    def open_rehearsal(self) -> None:
        self.calls.append("rehearse")


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> int:
        return i


def make_loader(boundaries: int = 10**9, **options) -> tuple[Loader, FakeDriver]:
    order = DataOrder(FakeSession(), seed=3, note=print)
    driver = FakeDriver(order, boundaries)
    return Loader(driver, order, Meter(), Numbers(), BatchRule(4), **options), driver


def test_a_pass_yields_each_sample_once_between_its_steps():
    loader, driver = make_loader()
    batches = [batch.tolist() for batch in loader]
    assert sorted(i for batch in batches for i in batch) == list(range(10))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert driver.calls == ["begin", "open 4", "open 4", "open 2", "check", "end"]


def test_a_pass_is_over_when_the_worker_has_left_its_generation():
    loader, driver = make_loader(boundaries=1)
    assert len(list(loader)) == 1
    assert driver.calls == ["begin", "open 4", "check", "end"]


def test_a_rehearsal_is_one_step_without_a_pass():
    loader, driver = make_loader(accumulate=2)
    driver.rehearsing = True
    assert [len(batch) for batch in loader] == [2, 2]
    assert driver.calls == ["rehearse", "rehearse"]
    assert driver.order.position == Position()
