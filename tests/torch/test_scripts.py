"""Ordinary scripts: three workers give the result of one process."""

from __future__ import annotations

import pytest
from elastic_lab import Lab, losses, seen

from shoal.wire import events as ev

SCRIPTS = {
    "a batch that does not divide by the workers": {"batch": 17},
    "fewer samples than workers in the last batch": {"samples": 33, "batch": 16},
    "gradient accumulation that does not divide the epoch": {"accumulate": 3, "batch": 7},
    "clipping and mixed precision with a gradient scaler": {"clip": True, "amp": True},
    "frozen, unused and shared weights": {"model": "odd", "clip": True},
    "an IterableDataset": {"stream": True, "samples": 50, "batch": 16},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_three_workers_train_as_one_process_does(lab: Lab, name: str):
    options = {"epochs": 3, "samples": 96, **SCRIPTS[name]}
    lab.say("hurry")
    with lab.job(3, **options) as job:
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    rows = lab.rows()
    assert seen(rows) == {e: list(range(options["samples"])) for e in range(3)}
    want, have = losses(lab.alone(**options)), losses(rows)
    assert have.keys() == want.keys()
    # bfloat16 has three digits, and how a product is rounded depends on the size of the batch.
    assert max(abs(have[s] - want[s]) for s in want) < (5e-3 if options.get("amp") else 1e-4)
    assert len({f["digest"] for f in lab.finals().values()}) == 1


def test_a_custom_synchronization_is_used_in_every_generation(lab: Lab):
    options = {"epochs": 12, "halves": True}
    with lab.job(2, **options) as job:
        job.wait_size(2)
        job.resize(3)
        job.wait_size(3)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    used = {path.name for path in lab.directory.glob("synced.*")}
    assert used == {"synced.w0.2", "synced.w1.2", "synced.w0.3", "synced.w1.3", "synced.w2.3"}
    want, have = losses(lab.alone(**options)), losses(lab.rows())
    assert max(abs(have[s] - want[s]) for s in want) < 1e-4
    assert len({f["digest"] for f in lab.finals().values()}) == 1


def test_batch_norm_statistics_are_the_same_on_all_workers_and_nobody_gets_a_single_sample(lab: Lab):
    lab.say("hurry")
    with lab.job(2, epochs=3, model="norm", samples=99) as job:  # the last batch has three samples
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert len({f["digest"] for f in lab.finals().values()}) == 1
    assert {len(r["ids"]) for r in lab.rows()} == {8, 3}
    assert seen(lab.rows()) == {e: list(range(99)) for e in range(3)}


def test_the_batch_grows_with_the_workers_up_to_its_limit_and_the_learning_rate_follows(lab: Lab):
    with lab.job(1, epochs=20, batch=8, max_batch=20) as job:
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 5)
        job.resize(3)
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.batch_size == 20)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        notes = [n for _, e in job.events if isinstance(e, ev.Measured) for n in e.report.notes]
    assert any("global batch 20 with 3 workers; learning rate x2.5 by the linear rule" in n for n in notes), (
        notes
    )
    rows = lab.rows()
    assert seen(rows) == {e: list(range(240)) for e in range(20)}
    by_step: dict[int, int] = {}
    for row in rows:
        by_step[row["step"]] = by_step.get(row["step"], 0) + len(row["ids"])
    assert set(by_step.values()) == {8, 20} | {n for n in by_step.values() if n < 20}


def test_reports_split_the_time_and_show_progress(lab: Lab):
    with lab.job(2, epochs=6) as job:
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.steps > 5 and e.report.workers == 2)
        lab.say("hurry")
        job.wait_end()
        reports = [e.report for _, e in job.events if isinstance(e, ev.Measured) and e.report.steps > 5]
    for r in reports:
        assert r.total_steps == 6 * 15
        assert r.compute_s >= 0
        assert r.sync_s > 0
        assert r.compute_s + r.sync_s + r.input_s < r.seconds * 2 + 1
        assert r.memory_bytes > 10**7
        assert r.samples == pytest.approx(r.steps * 8)
    assert any("loss" in r.values for r in reports)
