"""Real processes: a job whose workers change while it trains."""

from __future__ import annotations

import random
import signal

import pytest
from elastic_lab import Lab, losses, seen, until

from shoal.wire import events as ev
from shoal.wire.messages import Phase


def committed(members=None):
    return lambda e: (
        isinstance(e, ev.GenerationCommitted) and (members is None or set(e.members) == set(members))
    )


def last_members(job) -> tuple[str, ...]:
    return next(e.members for _, e in reversed(job.events) if isinstance(e, ev.GenerationCommitted))


def verified_notes(job) -> int:
    return sum(
        "verified bit for bit" in n
        for _, e in job.events
        if isinstance(e, ev.Measured)
        for n in e.report.notes
    )


def test_thirty_random_reconfigurations_leave_the_loss_curve_and_the_data_order_untouched(lab: Lab):
    options = {"samples": 240, "batch": 17, "epochs": 70, "sleep_s": 0.01, "optimizer": "sgd"}
    rng = random.Random(5)
    with lab.job(2, **options) as job:
        job.wait_size(2)
        for _ in range(30):
            since = len(job.events)
            present = list(last_members(job))
            kept = rng.sample(present, rng.randint(0, min(3, len(present))))
            fewest = 0 if 0 < len(kept) < len(present) else 1
            target = kept + job.new_workers(rng.randint(fewest, 4 - len(kept)))
            job.target(target)
            job.wait(committed(target), since=since)
        lab.say("hurry")
        end = job.wait_end()
        assert isinstance(end, ev.JobFinished), end
        assert verified_notes(job) > 30
    fixed = lab.alone(**options)
    rows = lab.rows()
    assert seen(rows) == {e: list(range(240)) for e in range(70)}
    want, have = losses(fixed), losses(rows)
    assert have.keys() == want.keys()
    assert max(abs(have[s] - want[s]) for s in want) < 1e-4
    assert len({r["generation"] for r in rows}) > 30


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_no_step_even_if_it_is_rank_0(lab: Lab, victim: int):
    options = {"epochs": 12, "batch": 16, "lr_every": 1, "gamma": 0.99}
    with lab.job(3, **options) as job:
        job.wait_size(3)
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 20)
        since = len(job.events)
        job.kill(f"w{victim}")
        job.wait_size(2, since=since)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    rows = lab.rows()
    fixed = lab.alone(**options)
    want = losses(fixed)
    # The others did the step of its death again, or finished it with its gradients, which they held. In the second
    # case it died before it wrote its row. Later steps must be as in an undisturbed run.
    last = max(r["step"] for r in rows if r["worker"] == f"w{victim}")
    late = losses([r for r in rows if r["step"] > last + 1])
    assert late
    assert max(abs(late[s] - want[s]) for s in late) < 1e-4
    assert max(late) == max(want)
    # A step that is done again advances the schedule once.
    (alone,) = lab.finals(lab.directory / "alone").values()
    assert {(f["count"], f["lr"]) for f in lab.finals().values()} == {(12 * 15, alone["lr"])}
    assert len({f["digest"] for f in lab.finals().values()}) == 1


@pytest.mark.parametrize("voted", [False, True])
def test_a_batch_that_follows_the_workers_is_counted_as_it_was_when_one_dies_in_its_step(
    lab: Lab, voted: bool
):
    options = {"batch": 8, "max_batch": 24, "epochs": 6, "die_holding": [10, voted]}
    with lab.job(3, **options) as job:
        job.wait_size(3)
        job.wait(committed(["w0", "w1"]))
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        assert verified_notes(job) >= 2
    have = seen(lab.rows())
    # The dead worker did not write the row of its 8 samples of the first step of epoch 1.
    assert {epoch: len(ids) for epoch, ids in have.items()} == {e: 240 - 8 * (e == 1) for e in range(6)}
    assert all(len(set(ids)) == len(ids) for ids in have.values())
    assert len({f["digest"] for f in lab.finals().values()}) == 1


def test_survivors_that_halt_at_different_points_check_their_states_after_the_same_step(lab: Lab):
    with lab.job(3, epochs=12) as job:
        job.wait_size(3)
        workers = job.handle.state.workers
        lab.say("hang.w1")  # after its step, while w0 enters the next one
        until(lambda: workers["w0"].arrived > workers["w1"].arrived)
        since = len(job.events)
        job.kill("w2")
        until(lambda: workers["w0"].status.phase is Phase.HALTED and workers["w1"].status.dead)
        (lab.directory / "hang.w1").unlink()
        job.wait(committed(["w0", "w1"]), since=since)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        assert {e.worker for _, e in job.events if isinstance(e, ev.WorkerLost)} == {"w2"}
        job.wait_gone(30)
        assert verified_notes(job) >= 2
    assert len({f["digest"] for f in lab.finals().values()}) == 1


def test_a_stopped_worker_is_detected_by_missing_heartbeats_and_replaced(lab: Lab):
    with lab.job(2, epochs=40, keep_size=True) as job:
        job.wait_size(2)
        since = len(job.events)
        job.kill("w0", signal.SIGSTOP)
        lost = job.wait(lambda e: isinstance(e, ev.WorkerLost), since=since)
        assert lost.worker == "w0"
        job.wait(committed(["w1", "w2"]), since=since)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)


def test_a_worker_that_hangs_in_the_script_is_detected_by_its_missed_step(lab: Lab):
    with lab.job(2, epochs=400) as job:
        job.wait_size(2)
        since = len(job.events)
        lab.say("hang.w1")
        lost = job.wait(lambda e: isinstance(e, ev.WorkerLost), since=since)
        assert lost.worker == "w1"
        assert "did not arrive" in lost.why
        job.wait(committed(["w0"]), since=since)


def test_a_script_that_evaluates_is_not_mistaken_for_one_that_hangs(lab: Lab):
    with lab.job(2, epochs=6) as job:
        job.wait_size(2)
        lab.say("evaluate")
        workers = job.handle.state.workers
        until(lambda: workers["w0"].status.away and workers["w1"].arrived > workers["w0"].arrived)
        (lab.directory / "evaluate").unlink()
        until(lambda: not workers["w0"].status.away)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        assert not any(isinstance(e, ev.WorkerLost) for _, e in job.events)
        job.wait_gone(30)


def test_if_all_workers_die_the_job_continues_from_its_last_checkpoint(lab: Lab):
    options = {"epochs": 8, "checkpoint_every": 10, "sleep_s": 0.1}  # so that a slow disk keeps up
    with lab.job(2, keep_size=True, **options) as job:
        job.wait_size(2)
        saved = job.wait(lambda e: isinstance(e, ev.Checkpointed) and e.step >= 20)
        since = len(job.events)
        for worker in ("w0", "w1"):
            job.kill(worker)
        first = job.wait(lambda e: isinstance(e, ev.GenerationCommitted) and e.kind == "first", since=since)
        assert first.step >= saved.step
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    want, finals = losses(lab.alone(**options)), lab.finals()
    later = losses([r for r in lab.rows() if r["worker"] not in ("w0", "w1")])
    assert max(abs(later[s] - want[s]) for s in later if s > first.step) < 1e-4
    assert {f["count"] for f in finals.values()} == {8 * 15}


def test_pause_frees_all_workers_and_resume_continues_on_another(lab: Lab):
    options = {"epochs": 10, "model": "dropout"}
    with lab.job(1, **options) as job:
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 10)
        job.pause()
        paused = job.wait(lambda e: isinstance(e, ev.JobPaused))
        until(lambda: not job.processes.pids)
        lab.say("hurry")
        job.resize(1)
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    rows = lab.rows()
    assert {r["worker"] for r in rows if r["step"] < paused.step} == {"w0"}
    assert {r["worker"] for r in rows if r["step"] >= paused.step} == {"w1"}
    # Random state travels: even with dropout the run is the one that was never paused.
    want, have = losses(lab.alone(**options)), losses(rows)
    assert have.keys() == want.keys()
    assert max(abs(have[s] - want[s]) for s in want) < 1e-6


def test_migration_of_one_worker_carries_its_random_state(lab: Lab):
    options = {"epochs": 10, "model": "dropout"}
    with lab.job(1, **options) as job:
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 10)
        job.migrate()
        job.wait(committed(["w1"]))
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    rows = lab.rows()
    assert seen(rows) == {e: list(range(240)) for e in range(10)}
    assert {r["worker"] for r in rows} == {"w0", "w1"}
    # It continues with the same random numbers as the other worker: that one's next numbers, not its last.
    dice = {w: {r["step"]: r["dice"] for r in rows if r["worker"] == w} for w in ("w0", "w1")}
    first = min(dice["w1"])
    assert dice["w0"][first] == dice["w1"][first]
    assert len(set(dice["w0"].values())) == len(dice["w0"])


def test_training_continues_without_the_control_plane_which_then_takes_over_again(lab: Lab):
    with lab.job(2, epochs=60) as job:
        job.wait_size(2)
        for remember in (True, False):
            state = job.stop_control()
            before = len(lab.rows())
            until(lambda: len(lab.rows()) > before + 40)  # noqa: B023
            job.start_control(state if remember else None)
            since = len(job.events)
            job.wait(lambda e: isinstance(e, ev.Measured), since=since)
            if not remember:
                job.wait(lambda e: len(job.handle.state.workers) == 2, since=since)
            grown = [*job.handle.state.active.members, *job.new_workers(1)]
            job.target(grown)
            job.wait(committed(grown), since=since)
            since = len(job.events)
            job.target(grown[:2])
            job.wait(committed(grown[:2]), since=since)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    rows = lab.rows()
    assert seen(rows) == {e: list(range(240)) for e in range(60)}


def test_loader_processes_outlive_a_resize(lab: Lab):
    options = {"epochs": 30, "num_workers": 1, "sleep_s": 0.02}
    with lab.job(1, **options) as job:
        job.wait(lambda e: isinstance(e, ev.Measured) and e.report.step > 10)
        since = len(job.events)
        job.resize(2)
        job.wait_size(2, since=since)
        job.wait(
            lambda e: isinstance(e, ev.Measured) and e.report.workers == 2 and e.report.steps > 5, since=since
        )
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    rows = lab.rows()
    assert seen(rows) == {e: list(range(240)) for e in range(30)}
    loaders = {p for r in rows if r["worker"] == "w0" for p in r["pids"]}
    assert len(loaders) == 1
    assert {r["size"] for r in rows if r["worker"] == "w0"} == {1, 2}


def test_a_straggler_is_replaced_with_the_same_primitive(lab: Lab):
    with lab.job(2, epochs=100, replace_stragglers=True) as job:
        job.wait_size(2)
        lab.say("slow.w1")
        slow = job.wait(lambda e: isinstance(e, ev.StragglerFound))
        assert slow.worker == "w1"
        assert slow.relative_speed < 0.8
        job.wait(committed(["w0", "w2"]))
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
