"""A training step by itself: real gradients and optimizer, no other workers."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from fakes import FakeGroup, FakeSession, FakeTwin, make_order, make_replica

import torch
from shoal.torch.aside import WIDTH
from shoal.torch.gradients import all_reduce
from shoal.torch.meter import Meter
from shoal.torch.order import Part
from shoal.torch.step import OFTEN, Steps, scaled_rates
from shoal.torch.step_state import Outcome, StepKind
from shoal.torch.vote import Vote

HALF = Part(0, 4, 0.5, last=True)


class FakeHandover:
    """Nothing is sent or received, unless `catching_up`."""

    def __init__(self) -> None:
        self.catching_up, self.rest_fits_next, self.arrives = False, False, True
        self.calls: list[str] = []
        self.sending = self

    def backward_ended(self) -> None:
        self.calls.append("backward ended")

    def give(self, flat: torch.Tensor) -> None:
        self.calls.append("give")

    def take_window(self) -> bool:
        self.calls.append("take window")
        return self.arrives

    def rest_fits(self, flag: int) -> bool:
        return True

    def wait_read(self) -> None:
        self.calls.append("wait read")

    def close_window(self, stepping: bool) -> None:
        self.calls.append("close for the optimizer" if stepping else "close")

    @contextmanager
    def partial_step(self):
        yield


class Bench:
    """A step of two workers. The other one adds `others` to each sum of gradients."""

    def __init__(self, others: float = 0.0) -> None:
        vote = FakeGroup(torch.zeros(1, dtype=torch.int64))
        self.session = FakeSession(
            world_size=2, contributors=(0, 1), next_contributors=(0, 1), vote_group=vote
        )
        self.session.data_group = FakeTwin(others, gradients=10)
        self.replica, self.order = make_replica(), make_order(self.session)
        self.handover, self.meter = FakeHandover(), Meter()
        self.outcomes: list[Outcome] = []
        self.steps = Steps(
            self.session,
            self.replica,
            self.order,
            self.handover,
            Vote(self.session),
            self.meter,
            all_reduce,
        )
        self.replica.synchronize(25.0, lambda: self.outcomes.append(self.steps.synchronize()))

    @property
    def weight(self) -> torch.Tensor:
        return self.replica.state.model.weight

    def backward(self, part: Part = HALF) -> None:
        self.steps.open(part, first=True, samples=4)
        self.replica.state.model(torch.ones(4, 4)).sum().backward()

    def optimize(self) -> None:
        optimizer = self.replica.state.optimizers[0]
        self.steps.optimizer_step(optimizer, optimizer.step)


def test_a_step_sums_votes_applies_and_advances():
    bench = Bench(others=3.0)
    before = bench.weight.detach().clone()
    bench.backward()
    assert bench.outcomes == [Outcome.DONE]
    assert (bench.weight.grad == 0.5 * 4 + 3.0).all()
    assert bench.session.reported == [("arrived", 1)]
    assert bench.steps.weight == 0.5
    bench.optimize()
    torch.testing.assert_close(bench.weight.detach(), before - 0.1 * 5.0)
    assert bench.steps.position.step == 1  # for a checkpoint within the loop's body
    step = bench.steps.settle(asked=True)
    assert step is not None
    assert step.stepped
    assert (bench.order.position.cursor, bench.order.position.step) == (8, 1)
    assert bench.handover.calls == [
        *("backward ended", "give", "wait read", "close for the optimizer", "close")
    ]
    assert bench.meter.report().samples == 4


def test_a_step_that_breaks_is_void_and_undone():
    bench = Bench()
    bench.session.works = False
    bench.replica.box["count"] = 1
    before = bench.weight.detach().clone()
    bench.backward()
    assert bench.outcomes == [Outcome.LOST]
    bench.steps.broke()
    assert bench.steps.recover(apply=False)
    assert not bench.steps.counts
    assert bench.steps.weight == 0.0
    bench.replica.box["count"] += 1  # the rest of the loop's body
    bench.replica.state.optimizers[0].param_groups[0]["lr"] = 9.0
    bench.optimize()
    assert bench.steps.settle(asked=True) is None
    assert torch.equal(bench.weight.detach(), before)
    assert bench.replica.box["count"] == 1
    assert bench.replica.state.optimizers[0].param_groups[0]["lr"] == 0.1
    assert bench.order.position.step == 0


def test_a_broken_step_whose_gradients_are_held_is_applied_and_counted_by_the_recovery():
    bench = Bench(others=3.0)
    vote = bench.session.vote_group
    bench.session.wait = lambda work: vote.calls == 0  # the sums complete, the vote does not
    bench.backward()
    assert bench.outcomes == [Outcome.HELD]
    bench.steps.broke()
    assert not bench.steps.recover(apply=True), "batch and learning rate follow after this step"
    assert bench.steps.counts
    assert (bench.weight.grad == 5.0).all()
    bench.optimize()
    step = bench.steps.settle(asked=True)
    assert step is not None
    assert step.counted
    assert bench.order.position.step == 1


def test_a_newcomer_votes_early_contributes_nothing_and_takes_the_window():
    bench = Bench(others=3.0)
    bench.handover.catching_up = True
    bench.steps.observe(bench.session.data_group, bench.session.vote_group, 1)
    assert bench.session.vote_group.calls == 1
    for bucket in bench.replica.buckets.buckets:
        bucket.flat.fill_(3.0)  # the sums, which the holders send
        bucket.flat[10 : 10 + WIDTH] = 0.0
    bench.backward(Part(0, 0, 0.0, last=True))
    assert bench.outcomes == [Outcome.DONE]
    assert bench.steps.present.kind is StepKind.CATCH_UP
    assert not bench.steps.counts
    assert bench.session.data_group.calls == 0
    assert bench.session.vote_group.calls == 1
    assert (bench.weight.grad == 3.0).all()
    assert "take window" in bench.handover.calls
    assert bench.steps.settle(asked=True) is not None
    assert bench.meter.report().steps == 0


def test_a_window_that_does_not_arrive_breaks_the_newcomers_step():
    bench = Bench()
    bench.handover.catching_up, bench.handover.arrives = True, False
    bench.backward()
    assert bench.outcomes == [Outcome.LOST]


def test_a_body_without_backward_is_refused_only_if_it_asks_for_more():
    for asked in (True, False):
        bench = Bench()
        bench.steps.open(HALF, first=True, samples=4)
        if asked:
            with pytest.raises(RuntimeError, match="must call backward"):
                bench.steps.settle(asked=True)
        else:
            assert bench.steps.settle(asked=False) is None
        assert bench.order.position.step == 0


def test_nothing_of_a_rehearsal_counts():
    bench = Bench()
    with bench.steps.rehearsal():
        bench.steps.open_rehearsal()
        assert bench.steps.rehearsing
        assert not bench.steps.counts
        bench.optimize()
    assert bench.steps.counts
    assert bench.steps.settle(asked=False) is None
    assert bench.order.position.step == 0


def test_learning_rates_are_scaled_only_during_the_optimizer_step():
    optimizer = make_replica(lr=0.5).state.optimizers[0]
    with scaled_rates(optimizer, 4.0):
        assert optimizer.param_groups[0]["lr"] == 2.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_workers_learn_in_every_thousandth_step_whether_their_weights_differ():
    bench = Bench()
    differ = []
    for step in (OFTEN - 1, OFTEN, OFTEN + 1):
        hashes = []
        for _ in range(2):  # this worker, and another one with other weights
            with torch.no_grad():
                bench.weight.mul_(1.5)
            bench.order.position.step = step
            bench.steps.open(HALF, first=True, samples=4)
            hashes.append(bench.replica.buckets.aside._state)
        differ.append(hashes[0] != hashes[1])
    assert differ == [False, True, False]
