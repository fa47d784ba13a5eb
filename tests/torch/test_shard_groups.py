"""Real processes: a model that is sharded over groups of workers, which are added, removed and lost as a whole."""

from __future__ import annotations

import random

import pytest
from elastic_lab import Lab, seen
from test_sharded import BF16_TOLERANCE, SCRIPT, alone, change, finish, members, notes, same_losses

from shoal.torch.launch import idle_workers
from shoal.wire import events as ev
from shoal.wire.messages import Resize

OPTIONS = {"epochs": 6, "sleep_s": 0.02, "group": 2}


def test_a_group_joins_and_leaves(lab: Lab):
    with lab.job(2, script=SCRIPT, **OPTIONS) as job:
        job.wait_size(2)
        with pytest.raises(ValueError, match="sharded over groups of 2 workers: give a multiple of 2, not 3"):
            job._do(lambda: job.request(Resize(3)))
        change(job, [*members(job), *job.new_workers(2)])
        change(job, list(members(job))[2:])
        finish(lab, job)
        assert any("shard groups of 2 workers, 1 of them: if a worker is lost" in n for n in notes(job))
    same_losses(lab, alone(lab, **OPTIONS))


def test_workers_that_no_group_can_use_are_told():
    assert idle_workers(4, 2) is None
    assert idle_workers(3, 1) is None
    assert idle_workers(5, 2) == (
        "1 of 5 workers wait without work: the model is sharded over groups of 2, so --resize to a multiple of 2"
    )


@pytest.mark.parametrize(
    ("options", "resizes", "tolerance"),
    [
        ({"epochs": 60, "clip": 0.1, "activation": True, "wrapped": True, "group": 2}, 20, 1e-4),
        ({"epochs": 60, "accumulate": 2, "batch": 7, "group": 3}, 20, 1e-4),
        ({"epochs": 12, "mixed": True, "group": 2}, 4, BF16_TOLERANCE),
    ],
    ids=["clipped", "accumulated over uneven parts", "bf16"],
)
def test_random_resizes_leave_the_loss_curve_untouched(
    lab: Lab, options: dict, resizes: int, tolerance: float
):
    """Any workers leave: those that remain form groups again."""
    options = {"sleep_s": 0.02, **options}
    rng, size = random.Random(5), options["group"]
    with lab.job(size, script=SCRIPT, **options) as job:
        job.wait_size(size)
        for _ in range(resizes):
            present = list(members(job))
            groups = rng.randint(1, 6 // size)
            kept = rng.sample(
                present, rng.choice([0, *range(size, min(len(present), groups * size) + 1, size)])
            )
            target = kept + job.new_workers(groups * size - len(kept))
            if set(target) != set(present):
                change(job, target)
        finish(lab, job)
        assert sum("verified bit for bit" in n for n in notes(job)) > resizes * 3 // 4
    fixed = alone(lab, **options)
    same_losses(lab, fixed, tolerance)
    assert seen(lab.rows()) == seen(fixed)


def test_a_lost_worker_takes_its_group_with_it_and_no_step_is_lost(lab: Lab):
    """One dies while all train, one while a new group receives the state."""
    options = {**OPTIONS, "epochs": 40, "clip": 0.1}
    with lab.job(4, script=SCRIPT, **options) as job:
        job.wait_size(4)
        first, second, third, fourth = members(job)
        job.kill(third)
        since = len(job.events)
        job.wait(
            lambda e: isinstance(e, ev.GenerationCommitted) and e.members == (first, second), since=since
        )
        job.target([first, second, *job.new_workers(2)])
        ready = [
            job.wait(lambda e, w=w: isinstance(e, ev.WorkerReady) and e.worker == w) for w in ("w4", "w5")
        ]
        assert ready
        job.kill("w5")
        change(job, [first, second, *job.new_workers(2)])
        assert not {third, fourth} & set(members(job))
        finish(lab, job)
    fixed = alone(lab, **options)
    same_losses(lab, fixed)
    assert seen(lab.rows()) == seen(fixed)
