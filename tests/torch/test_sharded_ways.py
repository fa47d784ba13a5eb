"""Real processes: evaluations, checkpoints and mistakes with sharded models."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sharded import change, members
from way_lab import SHARDED_WAYS, Ways, grow, notes

import torch
from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev

APART = "the workers do not run the sharded model together: every worker must run it for an evaluation"
MISTAKES_AND_ADVICE = {
    "evaluated_on_main": APART,
    "evaluated_on_main_within_an_epoch": APART,
    "evaluated_on_main_at_the_end": APART,
    "evaluated_in_broadcast": APART,
    "stop_on_one": "leave their loops together: if job.any(flag): break",
    "too_few_samples": "1 samples in batches of 10 do not give each of the 2 workers the same number of batches",
    "changed_model": "was changed after job.shard(): extra.weight, extra.bias",
    "average_of_rows": "job.state['average'] holds rows of a sharded tensor (DTensor), whose owner changes with the "
    "workers: keep whole tensors in it",
    "failing_collective": "what the workers do together after step 5 broke 3 times, though no worker was lost",
    "no_zero_grad": "call optimizer.zero_grad() in each",
}


@pytest.fixture
def ways(tmp_path: Path, zygote: Zygote) -> Ways:
    return Ways(tmp_path, zygote, SHARDED_WAYS)


@pytest.mark.parametrize("way", MISTAKES_AND_ADVICE)
def test_a_mistake_with_one_sharded_set_ends_the_job_with_advice(ways: Ways, way: str):
    ways.say("hurry")
    assert MISTAKES_AND_ADVICE[way] in ways.fail(way, 2)


def test_a_checkpoint_after_the_last_epoch_is_not_left_out_silently(ways: Ways):
    with ways.job("checkpoint_after_the_end", 2) as job:
        failed = job.wait(lambda e: isinstance(e, ev.JobFailed))
        assert "job.checkpoint() came after the last epoch" in failed.why


@pytest.mark.parametrize("way", ["evaluated_on_main", "evaluated_in_broadcast", "changed_model"])
def test_a_mistake_with_shard_groups_ends_the_job_with_advice(ways: Ways, way: str):
    ways.say("hurry")
    assert MISTAKES_AND_ADVICE[way] in ways.fail(way, 4, GROUP="2")


@pytest.mark.parametrize(("workers", "group"), [(2, "0"), (3, "0"), (4, "2")])
def test_an_evaluation_of_a_sharded_model_is_exact_at_any_number_of_samples(
    ways: Ways, workers: int, group: str
):
    alone = ways.alone("uneven_evaluation")
    ways.say("hurry")
    found = ways.run("uneven_evaluation", workers, GROUP=group)
    assert len(found) == workers
    for rows in found.values():
        assert len(rows) == len(alone) == 2
        for row, want in zip(rows, alone):
            assert row == pytest.approx(want, abs=1e-5)


def test_a_newcomer_of_a_sharded_set_may_evaluate_before_its_first_batch(ways: Ways):
    alone = ways.alone("evaluated_first")
    found = ways.run("evaluated_first", 2, grow)
    assert {row["size"] for row in found["w0"]} == {2, 3}
    for row, want in zip(found["w0"], alone, strict=True):
        assert row["found"] == pytest.approx(want["found"], abs=1e-5)


def saved(path: Path) -> tuple[int, float]:
    """The step of a checkpoint, and the sum of all elements of its parameters."""
    import pickle

    file = torch.load(path, weights_only=False)
    pieces = pickle.loads(file["pieces"])
    values = [
        file["large"][v.index] if hasattr(v, "index") and not torch.is_tensor(v) else v
        for _, v, _, _ in pieces
    ]
    return pickle.loads(file["facts"])["position"].step, float(sum(v.double().sum() for v in values))


@pytest.mark.parametrize(("workers", "group"), [(2, "0"), (4, "2")])
def test_every_checkpoint_that_the_script_asked_for_is_written_with_the_model_of_that_time(
    ways: Ways, workers: int, group: str
):
    ways.say("hurry")
    found = ways.run("best_and_last", workers, GROUP=group)["w0"]
    for name, row in (("best.pt", found[1]), ("last.pt", found[2])):
        step, total = saved(ways.directory / name)
        assert step == row["step"], name
        assert total == pytest.approx(sum(row["totals"].values()), abs=1e-5), name
    assert saved(ways.directory / "in_a_step.pt")[0] == 5
    assert (ways.directory / "regular.pt").exists()


def test_a_worker_lost_between_two_epochs_costs_no_sample_of_the_steps_done_again(ways: Ways):
    alone = ways.alone("lost_at_the_end_of_an_epoch")
    ways.say("dies")
    ways.say("hurry")
    with ways.job("lost_at_the_end_of_an_epoch", 3) as job:
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        assert any("continued from the copies of step 16" in n for n in notes(job))
    found = ways.rows()
    assert found["w0"][-1]["step"] == alone[-1]["step"] == 30
    assert found["w0"][-1]["final"] == pytest.approx(alone[-1]["final"], abs=1e-4)


@pytest.mark.parametrize("group", [1, 2], ids=["set", "groups"])
def test_an_average_of_whole_weights_is_that_of_one_process_over_resizes(ways: Ways, group: int):
    alone = ways.alone("averaged_weights")[-1]["final"]

    def story(job: LocalJob) -> None:
        change(job, [*members(job), *job.new_workers(group)])
        change(job, list(members(job))[group:])

    found = ways.run("averaged_weights", 2, story, GROUP=str(group if group > 1 else 0))
    finals = {worker: rows[-1]["final"] for worker, rows in found.items() if "final" in rows[-1]}
    assert len(finals) == 2
    assert "w0" not in finals, "newcomers have the average, too"
    for final in finals.values():
        assert final == pytest.approx(alone, abs=1e-4)
    assert {row["size"] for rows in found.values() for row in rows if "size" in row} == {2, 2 + group}
