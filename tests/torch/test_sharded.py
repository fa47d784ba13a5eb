"""Real processes: a sharded model (FSDP2) whose workers change while it trains."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from elastic_lab import Lab, losses, run_script, seen

from shoal.wire import events as ev

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"


def members(job) -> tuple[str, ...]:
    return next(e.members for _, e in reversed(job.events) if isinstance(e, ev.GenerationCommitted))


def notes(job) -> list[str]:
    return [n for _, e in job.events if isinstance(e, ev.Measured) for n in e.report.notes]


def change(job, target: list[str]) -> None:
    since = len(job.events)
    job.target(target)
    job.wait(lambda e: isinstance(e, ev.GenerationCommitted) and set(e.members) == set(target), since=since)


def finish(lab: Lab, job) -> None:
    lab.say("hurry")
    end = job.wait_end()
    assert isinstance(end, ev.JobFinished), end


def same_losses(lab: Lab, fixed: list, tolerance: float = 1e-4) -> None:
    want, have = losses(fixed), losses(lab.rows())
    assert have.keys() == want.keys()
    assert max(abs(have[s] - want[s]) for s in want) < tolerance


def alone(lab: Lab, **options) -> list:
    import json

    where = lab.directory / "alone"
    where.mkdir()
    (where / "hurry").write_text("yes")
    env = {"PROBE": json.dumps(options), "PROBE_DIR": str(where)}
    exit_, text = run_script(lab._zygote, [str(SCRIPT)], env, where)
    assert exit_.ok, f"{exit_}: {text}"
    return lab.rows(where)


def test_a_sharded_set_grows_and_shrinks(lab: Lab):
    options = {"epochs": 6, "sleep_s": 0.02}
    with lab.job(2, script=SCRIPT, **options) as job:
        job.wait_size(2)
        change(job, [*members(job), *job.new_workers(1)])
        change(job, list(members(job))[1:])
        finish(lab, job)
    same_losses(lab, alone(lab, **options))


BF16_TOLERANCE = 2e-2
"""A bfloat16 has 8 bits of precision, and the rounding depends on how the batch is cut into parts."""


@pytest.mark.parametrize(
    ("options", "resizes", "tolerance"),
    [
        ({"epochs": 24, "clip": 0.1, "activation": True, "wrapped": True}, 20, 1e-4),
        ({"epochs": 24, "accumulate": 2, "batch": 7}, 20, 1e-4),
        ({"epochs": 8, "mixed": True}, 4, BF16_TOLERANCE),
    ],
    ids=["clipped", "accumulated over uneven parts", "bf16"],
)
def test_random_resizes_leave_the_loss_curve_untouched(
    lab: Lab, options: dict, resizes: int, tolerance: float
):
    options = {"sleep_s": 0.01, **options}
    rng = random.Random(11)
    with lab.job(2, script=SCRIPT, **options) as job:
        job.wait_size(2)
        for _ in range(resizes):
            present = list(members(job))
            kept = rng.sample(present, rng.randint(0, min(3, len(present))))
            fewest = 0 if 0 < len(kept) < len(present) else 1
            change(job, kept + job.new_workers(rng.randint(fewest, 4 - len(kept))))
        finish(lab, job)
        assert sum("verified bit for bit" in n for n in notes(job)) > resizes
    fixed = alone(lab, **options)
    same_losses(lab, fixed, tolerance)
    assert seen(lab.rows()) == seen(fixed)
    assert len({r["generation"] for r in lab.rows()}) > resizes


@pytest.mark.parametrize("group", [None, 2])
def test_token_weights_with_accumulation_are_exact_over_uneven_parts(lab: Lab, group: int | None):
    """The weights of the parts are not proportional to their samples. One replicated worker gives the same model."""
    options = {"epochs": 8, "sleep_s": 0.02, "batch": 7, "accumulate": 3, "tokens": True, "clip": 0.5}
    with lab.job(2, script=SCRIPT, group=group, **options) as job:
        job.wait_size(2)
        change(job, [*members(job), *job.new_workers(group or 1)])
        change(job, list(members(job))[group or 1 :])
        finish(lab, job)
        job.wait_gone(30)
    alone(lab, replicated=True, **options)
    want = lab.finals(lab.directory / "alone")["alone"]
    found = lab.finals()
    assert found
    for final in found.values():
        assert final["step"] == want["step"]
        assert final["sums"] == pytest.approx(want["sums"], abs=1e-4)


def last_losses(rows: list) -> dict[int, float]:
    """Of steps that were done again, the last time counts."""
    last = {r["step"]: max(q["generation"] for q in rows if q["step"] == r["step"]) for r in rows}
    return losses([r for r in rows if r["generation"] == last[r["step"]]])


@pytest.mark.parametrize(
    ("options", "told", "then"),
    [
        ({"copy_every": 5}, "at most 5 steps back", "continued from the copies of step"),
        ({"checkpoint_every": 5}, "return to the last checkpoint", "continued from"),
    ],
)
def test_a_lost_worker_takes_its_rows_with_it_and_the_others_return(
    lab: Lab, options: dict, told: str, then: str
):
    options = {"epochs": 12, "sleep_s": 0.02, **options}
    with lab.job(3, script=SCRIPT, **options) as job:
        job.wait_size(3)
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 12)
        assert any("one sharded set of 3 workers" in n and told in n for n in notes(job))
        since = len(job.events)
        job.kill(members(job)[1])
        job.wait(lambda e: isinstance(e, ev.GenerationCommitted) and len(e.members) == 2, since=since)
        finish(lab, job)
        assert any(then in n for n in notes(job))
    want, have = losses(alone(lab, **options)), last_losses(lab.rows())
    assert have.keys() == want.keys()
    assert max(abs(have[s] - want[s]) for s in want) < 1e-4


@pytest.mark.parametrize(
    ("workers", "options"), [(3, {"copy_every": 5}), (4, {"group": 2})], ids=["set", "groups"]
)
def test_the_others_go_on_when_a_worker_dies_in_a_sum_of_gradients(lab: Lab, workers: int, options: dict):
    """One of them may find the closed connection and leave the sum, and another one wait for the first in it."""
    with lab.job(workers, script=SCRIPT, epochs=2, dies_in_sum=23, **options) as job:
        job.wait_size(2)
        finish(lab, job)


def test_without_copies_and_checkpoints_a_lost_worker_ends_the_job_with_what_to_do(lab: Lab):
    with lab.job(2, script=SCRIPT, epochs=50, sleep_s=0.02) as job:
        job.wait_size(2)
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 2)
        assert any("without one the job fails" in n for n in notes(job))
        job.kill(members(job)[0])
        end = job.wait_end()
    assert isinstance(end, ev.JobFailed)
    assert "let job.shard keep copies (copy_every=100), or write checkpoints" in end.why
