"""A job's size, searched while a policy gives it what it wants, or less."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.knowledge.heuristics import Point, Progress, ScalingEfficiency, UtilityAgainstCost, Verdict
from shoal.knowledge.size_search import BY_REPORT, BY_STEP, Autoscale, SizeSearch

HALF = Autoscale(ScalingEfficiency(0.5))


def knee(gpus: int, at: int = 6) -> float:
    """Seconds per step of a job that scales perfectly up to a knee, and not at all beyond."""
    return 1.0 / min(gpus, at)


def train(
    search: SizeSearch, step_s, decisions: int = 60, most=lambda i: 10**9, noise=0.05, seed=0
) -> list[int]:
    """Let it train at what it wants, or at what others leave it (`most` by decision); the sizes it had."""
    rng, had = np.random.default_rng(seed), []
    for i in range(decisions):
        wanted = search.cap.gpus or search.engine.options.max_gpus
        gpus = max(min(wanted, most(i)), search.engine.options.min_gpus)
        for _ in range(search.engine.steps_due(gpus)):
            search.observe(gpus, step_s(gpus) * float(np.exp(rng.normal(0.0, noise))))
        search.decide(Progress(0.0, 1e6))
        had.append(gpus)
    return had


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", [BY_STEP, BY_REPORT])
def test_it_climbs_to_the_knee_and_holds_the_job_there_saying_why(seed, options):
    search = SizeSearch(HALF, 1, 16, options)
    had = train(search, knee, seed=seed)
    assert had[:3] == [1, 2, 4]
    assert set(had[-20:]) == {6}
    assert search.cap.gpus == 6
    assert search.cap.why.startswith("the autoscaler holds it at 6 GPUs: from 6 to 7 GPUs each adds ")
    assert not search.cap.searching


def test_before_anything_is_measured_it_wants_the_least_and_says_that_it_measures():
    search = SizeSearch(HALF, 2, 16)
    assert search.cap.gpus == 2
    assert search.cap.why == "the autoscaler measures 2 GPUs before it lets it have more"
    assert search.decide() is None


@pytest.mark.parametrize("seed", range(5))
def test_what_others_take_meanwhile_is_measured_too_and_does_not_become_the_hold(seed):
    """From the 10th decision on others leave it three GPUs, from the 40th on all."""
    search = SizeSearch(HALF, 1, 16)
    had = train(search, knee, 80, most=lambda i: 3 if 10 <= i < 40 else 16, seed=seed)
    assert set(had[12:40]) == {3}
    assert set(had[-20:]) == {6}


def test_a_size_seen_for_a_step_or_two_is_not_judged():
    search = SizeSearch(HALF, 1, 16)
    for _ in range(11):
        search.observe(1, 1.0)
    search.decide()
    for gpus in (3, 4):  # others come and go: two steps at 3 GPUs, the second of them by chance slow
        search.observe(gpus, 9.0)
        search.observe(gpus, 9.0)
    for _ in range(11):
        search.observe(2, 0.5)
    hold = search.decide()
    assert hold is not None
    assert hold.gpus == 4, "1 -> 2 passes, so it climbs, whatever the slow steps at 3 and 4 were"


def test_when_the_speed_changes_it_searches_again():
    search = SizeSearch(HALF, 1, 16)
    assert train(search, knee)[-1] == 6
    assert train(search, lambda n: knee(n, 3), seed=1)[-1] == 3
    assert train(search, lambda n: knee(n, 12) / 1.5, seed=2)[-1] == 12


def test_the_owner_may_change_the_range_and_it_stays_within_it():
    search = SizeSearch(HALF, 1, 16)
    train(search, knee)
    assert search.rescaled(8, 12).gpus == 8
    assert set(train(search, knee, seed=1)) <= set(range(8, 13))
    assert search.rescaled(1, 4).gpus == 4
    assert train(search, knee, seed=2)[-1] == 4


def test_no_gpu_has_fewer_samples_than_it_must():
    search = SizeSearch(Autoscale(ScalingEfficiency(0.1), max_batch=256, min_local_batch=64), 1, 16)
    assert max(train(search, lambda n: 1.0 / n)) == 4
    assert search.cap.gpus == 4


def test_a_heuristic_that_cannot_judge_lets_the_job_have_any_size_and_says_why():
    search = SizeSearch(Autoscale(UtilityAgainstCost((10.0, 0.0), (0.0, 3600.0))), 1, 8)
    told = None
    for gpus in (1, 2):
        for _ in range(11):
            search.observe(gpus, 1.0)
        told = search.decide(Progress(0.0, None)) or told
    assert told is not None
    assert told.gpus is None
    assert told.why.endswith("unknown, because utility against cost needs to know the remaining work")


def test_its_state_survives_saving_as_json_at_any_moment():
    search = SizeSearch(HALF, 1, 16)
    rng = np.random.default_rng(0)
    for _ in range(400):
        gpus = search.cap.gpus or 16
        search.observe(gpus, knee(gpus) * float(np.exp(rng.normal(0, 0.1))))
        again = SizeSearch.from_dict(json.loads(json.dumps(search.to_dict())), HALF)
        assert again.decide() == search.decide()
        assert again.cap == search.cap


class Never:
    """A heuristic of someone else's."""

    def judge(self, smaller: Point, larger: Point, progress: Progress) -> Verdict:
        return Verdict(-1.0, 0.0, "never")


def test_words_become_what_was_asked_for():
    half = Autoscale.parse("efficiency:threshold=0.5:max_batch=512:step=2")
    assert half == Autoscale(ScalingEfficiency(0.5), step=2, max_batch=512)
    worth = Autoscale.parse("utility:worth=10,5,0:at_s=0,60,3600:price_per_gpu_hour=2")
    assert worth.heuristic == UtilityAgainstCost((10.0, 5.0, 0.0), (0.0, 60.0, 3600.0), 2.0)
    own = Autoscale.parse("never", [EntryPoint("never", f"{__name__}:Never", "shoal.heuristics")])
    assert set(train(SizeSearch(own, 1, 8), knee)[5:]) == {1}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("speed", "there is no heuristic named speed; there are"),
        ("efficiency:0.5", "write efficiency:option=value, not '0.5'"),
        ("efficiency:limit=0.5", "has no option 'limit'"),
        ("efficiency:threshold=much", "must be a number"),
        ("efficiency:max_batch=0", "max_batch='0' is not a number from 1 on"),
        ("utility:worth=10,0", "needs at_s"),
        ("utility:worth=10:at_s=0,1", "as many worths as times"),
        ("utility:worth=10,0:at_s=5,1", "in increasing order of seconds"),
        ("never:x=1", "has no option 'x'; it has none"),
        ("cwd", "has no `judge`"),
    ],
)
def test_a_mistake_in_the_words_is_told_in_a_sentence(word, why):
    own = [
        EntryPoint("never", f"{__name__}:Never", "shoal.heuristics"),
        EntryPoint("cwd", "builtins:dict", "shoal.heuristics"),
    ]
    with pytest.raises(ShoalError, match=None) as told:
        Autoscale.parse(word, own)
    assert why in str(told.value)
    assert "\n" not in str(told.value)
