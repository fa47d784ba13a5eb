"""A policy of whosoever's making that breaks the rules is stopped, in one line that says how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.base import CountPolicy
from shoal.policies.registry import BUILT_IN, make_policy, policy_class, policy_names
from shoal.scheduler.scheduler import Scheduler

PROFILE = Profile.of("m", {n: 1 / n for n in range(1, 9)})


class Gives(CountPolicy):
    """Whatever it is told to."""

    name = "gives"
    given: Any = ()
    wake_at_s = np.inf

    def shares(self, view: Any, gpus: int, now_s: float) -> Any:
        return self.given

    def wake_s(self, view: Any, shares: Any, now_s: float) -> float:
        return self.wake_at_s


def decide(given: Any, wake_at_s: float = np.inf) -> Any:
    """For two jobs of 2 to 6 GPUs on a cluster of 8, at 10 s."""
    policy = Gives()
    policy.given, policy.wake_at_s = given, wake_at_s
    scheduler = Scheduler(Cluster.pool(8), policy)
    jobs = [Job(f"j{i}", 0.0, GpuRange(2, 6), 4, model="m", iterations=9.0) for i in range(2)]
    return scheduler.step(10.0, [Submitted(i, job, PROFILE) for i, job in enumerate(jobs)])


@pytest.mark.parametrize(
    ("given", "wake_at_s", "how"),
    [
        (np.array([1, 0]), np.inf, "gave 1 GPUs to a job that takes none or 2 to 6"),
        (np.array([4, -2]), np.inf, "gave -2 GPUs to a job that takes none or 2 to 6"),
        (np.array([7, 0]), np.inf, "gave 7 GPUs to a job that takes none or 2 to 6"),
        (np.array([6, 4]), np.inf, "gave away 10 GPUs of 8"),
        (np.array([4]), np.inf, "must return an array of 2 whole numbers"),
        (np.array([4.0, 4.0]), np.inf, "must return an array of 2 whole numbers"),
        ([4, 4], np.inf, "must return an array of 2 whole numbers"),
        (np.array([4, 4]), 10.0, "asks at 10.0 s to decide again at 10.0 s"),
        (np.array([4, 4]), np.nan, "asks at 10.0 s to decide again at nan s"),
    ],
)
def test_a_decision_against_the_rules_is_told(given: Any, wake_at_s: float, how: str) -> None:
    with pytest.raises(ShoalError, match="policy 'gives'") as told:
        decide(given, wake_at_s)
    assert how in str(told.value)
    assert "a mistake in the policy" in str(told.value)


def test_whole_numbers_of_any_width_are_shares() -> None:
    assert [c.share.gpus for c in decide(np.array([2, 6], np.int64), 11.0).commands] == [2, 6]


def test_options_that_are_no_dataclass_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "undone", f"{__name__}:Undone")
    with pytest.raises(ShoalError, match="the Options of policy 'undone' are not a dataclass"):
        policy_class("undone")


class Undone(Gives):
    name = "undone"
    Options = dict


@pytest.mark.parametrize("name", policy_names())
def test_a_job_of_unknown_length_is_refused_where_nothing_can_be_decided_without_it(name: str) -> None:
    policy = make_policy(name)
    scheduler = Scheduler(Cluster.pool(8), policy)
    event = Submitted(0, Job("endless", 0.0, GpuRange(2, 6), 4, model="m", iterations=None), PROFILE)
    if not policy.takes_unknown_lengths:
        with pytest.raises(ShoalError, match="job 'endless' has no known length"):
            scheduler.step(0.0, [event])
    else:
        assert scheduler.step(0.0, [event]).commands[0].share.gpus >= 2
