"""A state too large for one step: newcomers catch up over many steps, and the others train meanwhile."""

from __future__ import annotations

from elastic_lab import Lab, losses, seen, until

from shoal.wire import events as ev

# 13 layers of 50 kB each with Adam: at this rate one of them takes longer than a step.
DEEP = {
    "model": "deep",
    "hidden": 64,
    "sleep_s": 0.01,
    "lr_every": 3,
    "clip": True,
    "state_bytes_per_s": 300_000,
}


def caught_up_in(lab: Lab, newcomer: str, generation: int = 2) -> set[int]:
    """The steps of a generation before the first one in which the newcomer had a part."""
    rows = [r for r in lab.rows() if r["generation"] == generation]
    first = min((r["step"] for r in rows if r["worker"] == newcomer), default=10**9)
    return {r["step"] for r in rows if r["step"] < first}


def committed(*members: str):
    return lambda e: isinstance(e, ev.GenerationCommitted) and set(e.members) == set(members)


def test_the_survivors_do_many_steps_while_a_newcomer_receives_the_state(lab: Lab):
    options = {**DEEP, "epochs": 24, "average": True, "accumulate": 2, "state_bytes_per_s": 150_000}
    with lab.job(2, **options) as job:
        job.wait_size(2)
        job.resize(3)
        grown = job.wait_size(3)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        notes = [n for _, e in job.events if isinstance(e, ev.Measured) for n in e.report.notes]
    assert f"generation {grown.generation}: state verified bit for bit on 3 members" in notes
    assert len(caught_up_in(lab, "w2")) >= 5
    assert any(r["worker"] == "w2" for r in lab.rows())
    options.pop("state_bytes_per_s")
    want, have = losses(lab.alone(**options)), losses(lab.rows())
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(24)}
    assert max(abs(have[s] - want[s]) for s in want) < 1e-4
    finals = lab.finals().values()
    assert len(finals) == 3
    assert len({(f["digest"], f["average"], f["lr"], f["count"]) for f in finals}) == 1
    # Also what each counted before backward, in the step in which the newcomer adopted the state.
    assert {f["early"] for f in finals} == {24 * 15}


def test_a_single_worker_trains_too_while_it_sends_its_state_again_and_again(lab: Lab):
    with lab.job(1, **{**DEEP, "state_bytes_per_s": 1_500_000}, epochs=400) as job:
        job.wait_size(1)
        for newcomer, generation in (("w1", 2), ("w2", 4)):
            job.resize(2)
            job.wait(committed("w0", newcomer))
            until(lambda: any(r["worker"] == newcomer for r in lab.rows()))  # noqa: B023
            assert len(caught_up_in(lab, newcomer, generation)) >= 5
            since = len(job.events)
            job.resize(1)
            job.wait(committed("w0"), since=since)


def test_a_newcomer_has_seen_as_many_batches_as_the_others_have(lab: Lab):
    # The checked mode also compares the counts of batch norm.
    with lab.job(1, model="norm", epochs=12) as job:
        job.wait_size(1)
        for size in (2, 3):
            job.resize(size)
            job.wait_size(size)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert {f["early"] for f in lab.finals().values()} == {12 * 15}


def test_a_newcomer_that_fails_while_it_catches_up_is_refused_and_the_others_train(lab: Lab):
    with lab.job(2, **DEEP, epochs=12) as job:
        job.wait_size(2)
        job.resize(3)
        until(lambda: len(caught_up_in(lab, "w2")) >= 2)
        lab.say("fail_catching_up.w2")
        refused = job.wait(lambda e: isinstance(e, ev.WorkerRefused))
        assert "MemoryError: no room for the others' state" in refused.why
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(12)}
    assert {f["count"] for f in lab.finals().values()} == {12 * 15}


def test_a_newcomer_that_has_no_room_for_the_state_is_refused_and_the_others_train(lab: Lab):
    lab.say("no_room.w2")
    with lab.job(2, **DEEP, epochs=12) as job:
        job.wait_size(2)
        job.resize(3)
        refused = job.wait(lambda e: isinstance(e, ev.WorkerRefused))
        assert "this worker could not receive the state: MemoryError('no room for it')" in refused.why
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(12)}
    assert {f["count"] for f in lab.finals().values()} == {12 * 15}


def test_a_newer_target_drops_a_newcomer_in_the_middle_of_the_transfer_at_once(lab: Lab):
    options = {**DEEP, "epochs": 24, "state_bytes_per_s": 30_000}
    with lab.job(1, **options) as job:
        job.wait_size(1)
        job.resize(2)
        until(lambda: len(caught_up_in(lab, "w1")) >= 2)
        since = len(job.events)
        job.resize(1)
        job.wait(lambda e: isinstance(e, ev.WorkerLeft) and e.worker == "w1")
        assert job.wait(committed("w0"), since=since).generation == 3
        assert not any(committed("w0", "w1")(e) for _, e in job.events)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert len(caught_up_in(lab, "w1")) < 13
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(24)}


def test_a_newcomer_that_both_targets_want_continues_to_receive(lab: Lab):
    with lab.job(1, **DEEP, epochs=200) as job:
        job.wait_size(1)
        job.resize(2)
        until(lambda: len(caught_up_in(lab, "w1")) >= 2)
        job.resize(3)
        job.wait(committed("w0", "w1", "w2"))
        assert {r["generation"] for r in lab.rows() if r["worker"] == "w1"} <= {2, 3}
        assert set(job.processes.running) == {"w0", "w1", "w2"}


def test_a_holder_that_dies_in_the_middle_costs_the_newcomer_only_its_part(lab: Lab):
    with lab.job(2, **DEEP, epochs=300, save_epochs=True) as job:
        job.wait_size(2)
        job.resize(3)
        until(lambda: len(caught_up_in(lab, "w2")) >= 2)
        job.kill("w0")
        job.wait(committed("w1"))
        job.wait(committed("w1", "w2"))
        assert not any(isinstance(e, ev.WorkerLost) and e.worker == "w2" for _, e in job.events)
        until(lambda: any(r["worker"] == "w2" for r in lab.rows()))
        committed_members = [e.members for _, e in job.events if isinstance(e, ev.GenerationCommitted)]
        assert ("w0", "w1", "w2") not in committed_members, "w2 never had the whole state beside w0"
        assert not (lab.directory / "saved.w2").exists(), "what w2 had of the state was saved"


def test_parameters_that_the_script_changes_between_backward_and_step_are_sent_as_they_are(lab: Lab):
    # So slow that a piece is being sent when backward ends, and so fast that it is sent before the optimizer step.
    options = {**DEEP, "state_bytes_per_s": 2_000_000, "optimizer": "sgd", "clip": False, "sleep_s": 0.005}
    with lab.job(2, **options, epochs=12, decay=True) as job:
        job.wait_size(2)
        job.resize(3)
        job.wait(committed("w0", "w1", "w2"))
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert len({f["digest"] for f in lab.finals().values()}) == 1


def test_a_newcomer_takes_no_part_in_sums_and_does_not_overwrite_those_it_receives(lab: Lab):
    # It sets its gradients to zero in place after the others' sums of the same step have arrived.
    lab.say("slow.w2")
    options = {**DEEP, "epochs": 24, "accumulate": 2, "zero_late": True, "halves": True}
    with lab.job(2, **options) as job:
        job.wait_size(2)
        job.resize(3)
        until(lambda: len(caught_up_in(lab, "w2")) >= 3)
        assert not list(lab.directory.glob("synced.w2.*"))
        job.wait(committed("w0", "w1", "w2"))
        until(lambda: list(lab.directory.glob("synced.w2.3")))
        (lab.directory / "slow.w2").unlink()
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert len({f["digest"] for f in lab.finals().values()}) == 1


def test_a_newcomer_that_voted_in_a_dropped_plan_gets_the_sums_of_the_next_one(lab: Lab):
    with lab.job(2, **DEEP, epochs=24, kill_when_observing=True) as job:
        job.wait_size(2)
        job.resize(3)
        job.wait(committed("w0", "w2"))
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    finals = lab.finals()
    assert finals.keys() == {"w0", "w2"}
    assert len({f["digest"] for f in finals.values()}) == 1


def test_a_newcomer_that_dies_in_the_middle_costs_no_step(lab: Lab):
    with lab.job(2, **DEEP, epochs=24) as job:
        job.wait_size(2)
        job.resize(3)
        until(lambda: len(caught_up_in(lab, "w2")) >= 2)
        since = len(job.events)
        job.kill("w2")
        job.wait(committed("w0", "w1"), since=since)
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(24)}
    assert len({f["digest"] for f in lab.finals().values()}) == 1
