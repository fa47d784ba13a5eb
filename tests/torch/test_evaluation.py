"""Evaluations by themselves: how the data is split, and who takes over the part of a worker that died."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch
from shoal.torch.aside import HEAD, LOGS, WIDTH, Aside
from shoal.torch.evaluation import EvaluationLoader, batches_of, split
from shoal.torch.reductions import WeightedSum
from shoal.torch.registered import check_registered
from shoal.torch.state import StateBox
from torch import nn

ranges = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=4).map(
    lambda pairs: [range(begin, begin + count) for begin, count in pairs]
)


@given(ranges, st.integers(1, 6), st.integers(1, 5))
def test_every_sample_is_in_one_part_and_one_batch(samples: list[range], workers: int, count: int):
    parts = split(samples, [f"w{i}" for i in range(workers)])
    assert [i for part in parts.values() for r in part for i in r] == [i for r in samples for i in r]
    for part in parts.values():
        batches = batches_of(part, count)
        assert [i for batch in batches for i in batch] == [i for r in part for i in r]
        assert len(batches) == count
        assert max(map(len, batches)) - min(map(len, batches)) <= 1


class Others:
    """A meeting with workers that give these answers: each round, who is still there and its result."""

    is_muted = False

    def __init__(self, rounds: list) -> None:
        self.rounds, self.evaluated_samples, self.evaluators = rounds, None, ()

    def exchange(self, point: str, make) -> list:
        return sorted([make(), *self.rounds.pop(0)], key=lambda pair: pair[0])


def loader_of(
    meeting: Others, workers: int, samples: int, sharded: bool, batch_size: int = 2
) -> EvaluationLoader:
    members = tuple(f"w{i}" for i in range(workers))
    session = SimpleNamespace(
        name="w0", members=members, contributors=tuple(range(workers)), joined=True, outside_shoal=False,
        set_away=lambda away: False, is_first_start=lambda: False,
    )  # fmt: skip
    return EvaluationLoader(session, meeting, lambda: sharded, list(range(samples)), batch_size)


def test_who_was_in_the_exchange_decides_who_takes_over_and_not_who_is_alive_later():
    """w2 died before the exchange of the first round, w1 in the second."""
    meeting = Others([[("w1", None)], [], []])
    found = [i for batch in loader_of(meeting, 3, 9, sharded=False) for i in batch.tolist()]
    assert sorted(found) == list(range(9)), "all of w1's samples, too: its results of both rounds are lost"
    assert meeting.evaluators == ("w0",)


def test_results_that_were_exchanged_outlive_their_worker():
    theirs = WeightedSum()
    theirs.add(4.0, 3.0)  # the mean of the samples 3, 4, 5
    meeting = Others([[("w1", theirs)], [], []])
    seen = []

    def step(batch):
        seen.extend(batch.tolist())
        return batch.double().mean()

    assert loader_of(meeting, 3, 9, sharded=False).mean(step) == 4.0
    assert sorted(seen) == [0, 1, 2, 6, 7, 8], "w2's part, in two rounds, and not w1's first"


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_a_sharded_model_runs_as_often_on_every_worker(samples: int):
    """With one sample per batch the second of two workers has one batch less, or none."""
    theirs = WeightedSum()
    indices = range((samples + 1) // 2, samples)
    if len(indices):
        theirs.add(sum(indices) / len(indices), float(len(indices)))
    loader = loader_of(Others([[("w1", theirs)]]), 2, samples, sharded=True, batch_size=1)
    runs = []
    found = loader.mean(lambda batch: runs.append(1) or batch.double().mean())
    assert found == (samples - 1) / 2
    assert len(runs) == (samples + 1) // 2
    with pytest.raises(RuntimeError, match=r"use job\.evaluate"):
        list(loader)


def test_sums_of_nested_values_are_weighted_and_ignore_what_counts_nothing():
    total, other = WeightedSum(), WeightedSum()
    total.add({"a": 1.0, "b": (torch.tensor([1.0, 2.0]), 3)}, 1.0)
    other.add({"a": 3.0, "b": (torch.tensor([3.0, 4.0]), 3)}, 3.0)
    other.add({"a": float("nan"), "b": (torch.tensor([0.0, 0.0]), 0)}, 0.0)
    total.add_sum(other)
    total.add_sum(WeightedSum())
    found = total.mean()
    assert found["a"] == 2.5
    assert found["b"][0].tolist() == [2.5, 3.5]
    assert found["b"][1] == 3.0


def asides(states: list[int]) -> list[Aside]:
    """Workers with these hashes of `job.state`, after their all-reduce."""
    found, total = [Aside() for _ in states], torch.zeros(WIDTH)
    for aside, state in zip(found, states):
        aside.set_place((1,), (0.1,), state)
        mine = torch.zeros(WIDTH)
        aside.write(mine)
        total += mine
    for aside in found:
        aside.read(total)
    return found


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6))
def test_all_workers_agree_whether_their_states_differ(states: list[int]):
    found = {aside.states_differ for aside in asides(states)}
    same = len({(s % 251, s % 241) for s in states}) == 1
    assert found == {not same}


def test_more_logged_values_than_fit_take_turns():
    aside, sent = Aside(), set()
    for turn in range(4):
        for i in range(3 * LOGS - 1):
            aside.log(f"{i:03}", float(i), 1.0)
        aside.set_place((turn,), (), 0, turn)
        numbers = torch.zeros(WIDTH)
        aside.write(numbers)
        assert int((numbers[HEAD::3] > 0).sum()) == LOGS
        aside.read(numbers)
        sent = set(aside.means)
    assert len(sent) == 3 * LOGS - 1
    assert aside.means["007"] == 7.0


def test_plain_values_of_the_state_are_hashed_and_others_are_not():
    def hashed(**values) -> int:
        return StateBox(**values).quick_hash()

    assert hashed(best=0.5) == hashed(best=0.5) != hashed(best=0.25)
    assert hashed(best=float("inf")) != hashed(best=0.5)
    assert hashed(a={"x": [1, 2]}) != hashed(a={"x": [1, 3]})
    assert hashed(a=torch.tensor(1.0)) != hashed(a=torch.tensor(2.0))
    assert hashed(a=torch.zeros(9)) == hashed(a=torch.ones(9)), "compared at each epoch"
    assert hashed() == 0


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


class Wrapper:
    """As frameworks wrap a schedule."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def state_dict(self):
        return self.inner.state_dict()


def test_a_schedule_is_known_within_others_and_within_wrappers():
    mine, other = optimizer(), optimizer()
    parts = [torch.optim.lr_scheduler.ConstantLR(mine), torch.optim.lr_scheduler.StepLR(mine, 2)]
    both = torch.optim.lr_scheduler.SequentialLR(mine, parts, [3])
    elsewhere = torch.optim.lr_scheduler.StepLR(other, 2)
    for registered in ([both], [Wrapper(both)], [{"a": [both]}]):
        check_registered([mine], registered)
    with pytest.raises(
        RuntimeError, match=r"pass it to job\.wrap\(model, optimizer, schedulers=\[scheduler\]\)"
    ):
        check_registered([mine], [parts[0], elsewhere])


def test_a_schedule_that_the_script_has_dropped_is_no_mistake():
    mine = optimizer()
    dropped = torch.optim.lr_scheduler.LambdaLR(mine, lambda step: 1.0)
    dropped.itself = dropped  # only the garbage collector frees it
    del dropped
    check_registered([mine], [])


def test_scalers_and_averages_of_weights_must_travel_if_they_are_used():
    mine = optimizer()
    scaler, average = torch.amp.GradScaler("cpu"), torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    unused = torch.amp.GradScaler("cpu", enabled=False)
    check_registered([mine], [scaler, {"average": average}])
    for kept, name in (([average], "GradScaler"), ([scaler], "AveragedModel")):
        with pytest.raises(RuntimeError, match=f"does not know the {name}, .* put it into job.state"):
            check_registered([mine], kept)
    check_registered([mine], [scaler], sharded=True)
    assert not unused.is_enabled()
