"""The life of a job, as a table and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.server.api.models import JobState
from shoal.server.loop.lifecycle import Life, Verb, WrongState, apply, hold_gpus, may, settle


def walk(*verbs: Verb) -> Life:
    life = Life.begin(0.0)
    for i, verb in enumerate(verbs, 1):
        life = apply(life, verb, float(i))
    return life


@pytest.mark.parametrize(
    ("verbs", "state"),
    [
        ((), "pending"),
        ((Verb.START,), "starting"),
        ((Verb.START, Verb.RUN), "running"),
        ((Verb.START, Verb.RUN, Verb.PREEMPT), "pending"),
        ((Verb.START, Verb.RUN, Verb.PREEMPT, Verb.START, Verb.RUN, Verb.SUCCEED), "succeeded"),
        ((Verb.START, Verb.RUN, Verb.HOLD, Verb.RELEASE), "pending"),
        ((Verb.HOLD, Verb.CANCEL, Verb.VANISH), "cancelled"),
        ((Verb.START, Verb.CANCEL, Verb.SUCCEED), "succeeded"),
        ((Verb.START, Verb.FAIL), "failed"),
        ((Verb.START, Verb.RUN, Verb.RESTART, Verb.START), "starting"),
    ],
)
def test_verbs_lead_from_state_to_state(verbs: tuple[Verb, ...], state: str) -> None:
    assert walk(*verbs).state.value == state


@pytest.mark.parametrize(
    ("verbs", "verb", "words"),
    [
        ((), Verb.RELEASE, "it is pending and cannot be resumed"),
        ((Verb.START, Verb.FAIL), Verb.CANCEL, "it is failed and cannot be cancelled"),
        ((Verb.CANCEL,), Verb.HOLD, "it is stopping and cannot be paused"),
        ((), Verb.RUN, "job.running cannot follow pending"),
    ],
)
def test_what_is_not_in_the_table_cannot_happen(verbs: tuple[Verb, ...], verb: Verb, words: str) -> None:
    with pytest.raises(WrongState, match=words):
        apply(walk(*verbs), verb, 10.0)


def test_an_impossible_transition_tells_the_story_of_the_job() -> None:
    with pytest.raises(WrongState) as error:
        apply(walk(Verb.START, Verb.RUN, Verb.PREEMPT), Verb.RUN, 10.0)
    assert str(error.value) == (
        "job.running cannot follow pending (its story: pending -> starting by job.started at 1.000; "
        "starting -> running by job.running at 2.000; running -> pending by job.preempted at 3.000)"
    )


def test_every_state_that_is_not_final_can_be_left_by_cancelling() -> None:
    for state in JobState:
        life = Life(state, 0.0, 0.0)
        if not state.is_final and state is not JobState.STOPPING:
            assert may(life, Verb.CANCEL), state
    assert may(Life(JobState.STOPPING, 0.0, 0.0), Verb.VANISH)


@given(st.lists(st.tuples(st.sampled_from(list(Verb)), st.integers(0, 8), st.floats(-5, 50))))
def test_all_time_is_accounted_for_once_whatever_happens(steps: list[tuple[Verb, int, float]]) -> None:
    life, now_s = Life.begin(100.0), 100.0
    for verb, gpus, wait_s in steps:
        now_s += wait_s  # also backwards
        if may(life, verb):
            before = life
            life = apply(life, verb, now_s)
            assert life.restarts - before.restarts == (verb is Verb.RESTART)
        if not life.state.is_final:
            life = hold_gpus(life, gpus, now_s)
    life = settle(life, now_s)
    spent = life.waiting_s + life.running_s + life.paused_s
    assert spent == pytest.approx(life.settled_s - life.submitted_s)
    assert min(life.waiting_s, life.running_s, life.paused_s, life.gpu_s) >= 0
    assert (life.finished_s is not None) == life.state.is_final
    assert not (life.state.is_final and life.gpus)
