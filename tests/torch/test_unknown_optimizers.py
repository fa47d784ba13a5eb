"""Optimizers that the job does not know: which of them train beside it, and which are for something else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import make_replica
from torch.optim import optimizer as hooks

import torch
from shoal.torch.unknown_optimizers import UnknownOptimizers

UNKNOWN = r"the job does not know the optimizer SGD, .* job\.wrap\(models=\[\.\.\.\], optimizers=\[\.\.\.\]\)"


class Bench:
    """A job in a training step. `probe` is an optimizer of the script's own, over other parameters."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(outside_shoal=False, training=True, done=3)
        self.steps = SimpleNamespace(counts=True, present="a step")
        self.replica = make_replica()
        self.known = self.replica.state.optimizers[0]
        self.unknown = UnknownOptimizers(self.session, self.replica, self.steps)
        self.probe = self.make_probe()

    def make_probe(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    def next_step(self) -> None:
        self.session.done += 1


@pytest.fixture
def bench():
    bench = Bench()
    with bench.unknown.refused():
        yield bench


def test_a_new_optimizer_over_the_jobs_parameters_is_refused_at_once(bench: Bench):
    bench.steps.present = None
    with pytest.raises(RuntimeError, match=UNKNOWN):
        torch.optim.SGD(bench.replica.state.model.parameters(), lr=0.1).step()


def test_an_optimizer_of_something_else_is_refused_when_it_steps_in_a_second_training_step(bench: Bench):
    bench.probe.step()
    bench.probe.step()
    bench.next_step()
    with pytest.raises(RuntimeError, match=UNKNOWN):
        bench.probe.step()


def test_an_optimizer_of_a_single_batch_is_left_alone(bench: Bench):
    for _ in range(3):
        bench.make_probe().step()
        bench.next_step()


@pytest.mark.parametrize("where", ["between steps", "a rehearsal", "after the end", "outside Shoal"])
def test_an_optimizer_that_is_no_part_of_the_training_is_left_alone(where: str):
    bench = Bench()
    bench.session.outside_shoal = where == "outside Shoal"
    bench.session.training = where != "after the end"
    bench.steps.counts = where != "a rehearsal"
    bench.steps.present = None if where == "between steps" else "a step"
    with bench.unknown.refused():
        for _ in range(2):
            bench.probe.step()
            bench.next_step()


class Wrapper(torch.optim.Optimizer):
    """As those of Accelerate or of Lookahead: it has the groups of another optimizer, and calls it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.param_groups, self.inner = inner.param_groups, inner

    def step(self, closure=None):
        return self.inner.step()


def test_a_wrapper_of_an_optimizer_that_the_job_knows_is_known(bench: Bench):
    for _ in range(2):
        Wrapper(bench.known).step()
        bench.next_step()


def test_what_an_optimizer_that_the_job_knows_calls_is_known(bench: Bench):
    for _ in range(2):
        with bench.unknown.known_step():
            bench.probe.step()
        bench.next_step()


def test_nothing_is_left_of_the_check_after_the_training():
    before = len(hooks._global_optimizer_pre_hooks)
    for _ in range(2):
        bench = Bench()
        with bench.unknown.refused():
            assert len(hooks._global_optimizer_pre_hooks) == before + 1
        assert len(hooks._global_optimizer_pre_hooks) == before
