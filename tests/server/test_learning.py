"""What is learned of a live job's speed, from what its workers report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.knowledge.plain_speed import SIGNIFICANT, plain_speed
from shoal.server.loop.learning import ENOUGH_STEPS, Pace
from shoal.wire.messages import Report

from .fakes import run, server


def reports(step_s: float, every_s: float, count: int, first: int = 0) -> list[Report]:
    """As a worker makes them: at its own times, telling of the steps completed since the last."""
    made, before = [], 0
    for i in range(1, count + 1):
        done = int(i * every_s / step_s)
        steps = done - before
        made.append(
            Report(
                step=first + done,
                steps=steps,
                seconds=every_s,
                workers=2,
                samples=1.0,
                compute_s=steps * step_s,
            )
        )
        before = done
    return made


@pytest.mark.parametrize("step_s", [0.01, 0.3, 0.8, 1.7])
def test_the_pace_is_that_of_the_steps_however_reports_fall_between_them(step_s: float) -> None:
    pace = Pace()
    found = [s for report in reports(step_s, 0.5, 40) if (s := pace.take(report)) is not None]
    assert found
    assert found == pytest.approx([step_s] * len(found))


def test_steps_of_the_generation_before_do_not_count_for_the_new_one() -> None:
    pace = Pace()
    pace.begin(10)
    late = Report(step=12, steps=5, seconds=0.5, workers=2, samples=1.0, compute_s=0.1)
    assert pace.take(late) is None
    assert (pace.steps, pace.busy_s) == (0, 0.0)
    with_pause = Report(step=20, steps=8, seconds=9.0, workers=2, samples=1.0, compute_s=9.0, pause_s=3.0)
    assert pace.take(with_pause) is None
    clean = Report(step=30, steps=10, seconds=1.0, workers=2, samples=1.0, compute_s=0.9, sync_s=0.1)
    assert pace.take(clean) == pytest.approx(0.1)


def test_a_single_step_says_nothing_yet() -> None:
    pace = Pace()
    for i in range(1, ENOUGH_STEPS):
        assert pace.take(Report(step=i, steps=1, seconds=0.5, workers=1, samples=1.0, compute_s=0.5)) is None
    last = Report(step=ENOUGH_STEPS, steps=1, seconds=0.5, workers=1, samples=1.0, compute_s=0.5)
    assert pace.take(last) == pytest.approx(0.5)


def test_a_share_counts_as_slower_only_if_it_plainly_is() -> None:
    noise = np.array([0.0, 10.0, 18.0, 24.0, 23.0])
    assert int(np.argmax(plain_speed(noise, 1))) == 4
    plainly = np.array([0.0, 10.0, 18.0, 24.0, 15.0])
    assert int(np.argmax(plain_speed(plainly, 1))) == 3


@given(
    speed=st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=12),
    data=st.data(),
)
def test_the_minimum_is_always_worth_having_and_no_speed_is_changed_by_much(
    speed: list[float], data: st.DataObject
) -> None:
    low = data.draw(st.integers(1, len(speed)))
    given_ = np.array([0.0, *speed])
    made = plain_speed(given_, low)
    assert int(np.argmax(made)) >= low, "else the job could not be given even its minimum"
    changed = np.flatnonzero(made[low:] != given_[low:]) + low
    best = np.maximum.accumulate(made)
    assert all(given_[n] >= (1 - SIGNIFICANT) * best[n - 1] * (1 - 1e-4) for n in changed)


def test_a_job_begins_with_what_earlier_jobs_of_its_command_taught_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            first = (await here.submit("1..4", name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            assert "assumed" in (await here.get(f"/jobs/{first}/profile"))["basis"]
            await here.until(lambda: here.loop.jobs[first].progress.speed, train=(first,))
            here.fleet.step(first, total=1)
            await here.until(lambda: here.state(first) == "succeeded")
        async with server(tmp_path, 4, policy="max-min") as here:
            known = (await here.submit("1..4", name="known"))["id"]
            found = await here.get(f"/jobs/{known}/profile")
            assert "measured on virtual" in found["basis"]
            measured = {p["gpus"]: p["speed"] for p in found["points"] if p["measured"]}
            assert measured[4] == pytest.approx(40.0, rel=0.05), "0.1 s by four workers"
            over = await here.get(f"/jobs/{first}/profile")
            assert over["points"] == found["points"], "of a job that is over, what is on record"
            assert (over["job"]["name"], over["job"]["state"]) == ("first", "succeeded")
            assert over["remaining"]["unknown"] == "the job is over"
            other = (await here.submit("1..4", name="other", command=["another"]))["id"]
            assert "assumed" in (await here.get(f"/jobs/{other}/profile"))["basis"]

    run(story())


def test_what_is_left_comes_from_the_best_source_there_is_and_says_which(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            loss = (await here.submit("1", resize="live", target_loss=0.01, name="loss"))["id"]
            steps = (await here.submit("1", resize="live", name="steps"))["id"]
            owner = (await here.submit("1", expected_s=100, name="owner"))["id"]
            nothing = (await here.submit("1", name="nothing"))["id"]
            every = (loss, steps, owner, nothing)
            await here.until(lambda: all(here.state(j) == "running" for j in every))
            for _ in range(60):
                here.fleet.step(loss, counted=False)
                here.fleet.step(steps, total=500)
                await asyncio.sleep(0.002)
            await here.until(lambda: (here.loop.jobs[loss].progress.step or 0) >= 60)
            left = {j: (await here.get(f"/jobs/{j}"))["remaining"] for j in every}
            assert left[steps]["basis"] == "the job's own count of steps"
            assert left[steps]["low_s"] == left[steps]["high_s"] == pytest.approx(44.0, rel=0.1)
            assert left[owner]["basis"] == "what its owner expects"
            assert left[owner]["low_s"] < left[owner]["high_s"]
            assert "nothing is known" in left[nothing]["unknown"]
            assert left[loss]["basis"] == "its loss curve"
            # The loss is 1/(1+step): 0.01 comes at step 99, about 39 steps of 0.1 s from here.
            assert left[loss]["low_s"] <= 3.9 * 1.2
            assert left[loss]["high_s"] >= 3.9 * 0.8

    run(story())
