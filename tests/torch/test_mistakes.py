"""Real processes: ordinary mistakes end with an error that says what to do, or the runtime makes them right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elastic_lab import until
from way_lab import MISTAKES, Ways, grow, notes

import shoal.torch as shoal
import torch
from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev
from shoal.wire.messages import Kind
from torch import nn


@pytest.fixture
def ways(tmp_path: Path, zygote: Zygote) -> Ways:
    return Ways(tmp_path, zygote, MISTAKES)


MISTAKES_AND_ADVICE = {
    "plain_loader": "Train on `for batch in job.loader(dataset, ...)` instead of a DataLoader",
    "plain_range": "Write `for epoch in job.epochs(n)` instead of range(n)",
    "passes_within_an_epoch": "For more passes count more epochs, as in job.epochs(50) for 10 times 5 passes",
    "second_loop": "count all epochs in it, and branch on the epoch",
    "own_mesh": "or give fully_shard the job's mesh: fully_shard(module, mesh=job.mesh())",
    "plateau_on_main": "scheduler 0 of job.wrap differs between the workers: last_epoch 1 on w0, 0 on w1",
    "stop_on_main": "the script of w0 ended after step 20, and w1 went on to step 21",
    "stop_before_a_decision": "the script of w1 ended after step 20, and w0 went on and waits for a value of it",
    "break_on_one": "the workers are at different batches",
    "return_on_one": "the script of w1 ended after step 15, and w0 went on to step 16",
    "break_to_evaluate": "w1 waits for a value of w0",
    "mean_on_main": "w0 waits for a value of w1",
    "break_in_evaluation": "the workers are at different points: w0 is at the end of a pass over the eval_loader of 20 "
    "samples, w1 is at job.mean. Call these on every worker, in the same order, and leave a loop over an eval_loader",
    "different_reductions": "the workers are at different points: w0 is at job.sum, w1 is at job.mean",
    "sum_loss": "the loss is a sum over the samples",
    "divided_loss": "a sum divided by the batch size of all workers",
    "changed_model": "was changed after job.wrap(): 2.weight, 2.bias",
    "step_on_one": "optimizer.step() was left out on some of them",
    "gan_step_on_one": "optimizer.step() was left out on some of them",
    "best_weights_on_main": "parameter 0.weight differs between the workers w0 and w1",
    "clips_on_one": "parameter 0.weight differs between the workers w0 and w1: something has changed it on some",
    "freeze_on_one": "requires_grad of parameter 0.weight differs between the workers: True on w0, False on w1",
    "critic_unwrapped": "the job does not know the optimizer Adam, which has stepped within job.epochs()",
    "second_optimizer": "the job does not know the optimizer SGD, which has stepped within job.epochs()",
    "unregistered_schedule": "the job does not know the schedule StepLR of its optimizer",
    "unregistered_plateau": "the job does not know the schedule ReduceLROnPlateau of its optimizer",
    "rank_before_epochs": "job.rank is not known before job.epochs(): every worker would read 0, also newcomers. For "
    "what should happen once, use job.is_main, job.is_first",
    "world_size_before_epochs": "The batch size of job.loader is that of all workers together",
    "unregistered_scaler": "the job does not know the GradScaler, which would begin anew",
    "unregistered_average": "the job does not know the AveragedModel, which would begin anew",
    "mean_before_epochs": "before job.epochs() the workers do not know each other",
    "lost_after_its_part": "w1 was lost after its part of the evaluation, and its result with it: use job.evaluate",
}


@pytest.mark.parametrize("way", MISTAKES_AND_ADVICE)
def test_a_mistake_ends_the_job_with_an_error_that_says_what_to_do(ways: Ways, way: str):
    ways.say("hurry")
    assert MISTAKES_AND_ADVICE[way] in ways.fail(way, 2)


@pytest.mark.parametrize("way", ["passes_within_an_epoch", "second_loop", "pass_after_the_end"])
def test_a_mistake_about_epochs_is_the_same_error_outside_shoal(ways: Ways, way: str):
    with pytest.raises(AssertionError, match=r"RuntimeError: .*(count .*epochs|job\.eval_loader)"):
        ways.alone(way)


@pytest.mark.parametrize("within", [True, False], ids=["within it", "after its last batch"])
def test_a_model_that_is_changed_in_the_last_epoch_is_found_unless_the_training_is_over(within: bool):
    job = shoal.init()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(list(range(8)), batch_size=4)

    def train() -> None:
        for _ in job.epochs(1):
            for _ in loader:
                if within:
                    model[1] = nn.Linear(3, 1)
            model.half()  # to export it, for example

    if within:
        with pytest.raises(RuntimeError, match=r"was changed after job.wrap\(\): 1.weight, 1.bias"):
            train()
    else:
        train()


@pytest.mark.parametrize(
    ("step", "then"),
    [("4", "continue"), ("8", "continue"), ("4", "return")],
    ids=["within an epoch", "in the last step", "at the end of the script"],
)
def test_the_script_cannot_leave_out_the_error_that_the_workers_have_come_apart(
    ways: Ways, step: str, then: str
):
    ways.say("hurry")
    why = ways.fail("errors_leave_batches_out", 2, STEP=step, THEN=then)
    assert "optimizer.step() was left out on some of them" in why


def test_an_error_between_two_steps_does_not_only_end_an_epoch(ways: Ways):
    ways.say("hurry")
    assert "scheduler 0 of job.wrap differs between the workers" in ways.fail("errors_end_epochs", 2)


@pytest.mark.parametrize("who", ["main", "until lost"])
def test_an_evaluation_after_the_last_epoch_without_all_workers_is_an_error(ways: Ways, who: str):
    ways.say("hurry")
    with ways.job("evaluate_after_the_end", 2, EVALUATES=who) as job:
        failed = job.wait(lambda e: isinstance(e, ev.JobFailed))
        job.wait_gone(30)
        assert (
            "a worker has ended, or was lost, while another one needs it after the last epoch" in failed.why
        )
        assert job.failed_after_end == "w0 ended with code 1"


def test_all_workers_evaluate_together_after_the_last_epoch(ways: Ways):
    found = ways.run("evaluate_after_the_end", 2, EVALUATES="all")
    assert found == {worker: [{"first": True, "mean": 15.0}] for worker in ("w0", "w1")}


def test_a_schedule_that_newcomers_do_not_know_is_an_error_at_their_first_different_rate(ways: Ways):
    def story(job: LocalJob) -> None:
        job.wait_size(2)
        job.resize(3)
        job.wait(lambda e: isinstance(e, ev.WorkerReady) and e.worker == "w2")
        ways.say("grown")
        job.wait_size(3)

    why = ways.fail("own_schedule", 2, story)
    assert "the learning rate of parameter group 0 differs between the workers: " in why, why
    assert "Pass schedules to job.wrap(..., schedulers=[...])" in why


def test_a_loss_divided_by_the_batch_of_all_workers_is_right_for_one_worker_and_refused_for_two(ways: Ways):
    with ways.job("divided_loss", 1) as job:
        job.wait_size(1)
        job.resize(2)
        refused = job.wait(lambda e: isinstance(e, ev.WorkerRefused))
        assert "a sum divided by the batch size of all workers" in refused.why
        ways.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)


@pytest.mark.parametrize("seeded", ["yes", "no"])
def test_streams_that_differ_between_the_workers_are_told_once(ways: Ways, seeded: str):
    ways.say("hurry")
    with ways.job("shuffled_stream", 2, SEEDED=seeded) as job:
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        told = [n for n in notes(job) if "the IterableDataset gives another sample on some workers" in n]
    assert len(told) == (0 if seeded == "yes" else 1)


def test_the_best_value_that_only_main_sets_outlives_it(ways: Ways):
    with ways.job("best_on_main", 2) as job:
        ways.say("hurry")
        job.wait(lambda e: any("job.state['best'] differed" in n for n in notes(job)))
        ways.say("die")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        told = [n for n in notes(job) if "job.state['best'] differed between the workers" in n]
    found = ways.rows()
    first, second = found["w0"], found["w1"]
    assert [row["epoch"] for row in first + second] == list(range(6))
    assert second[0]["before"] == min(row["error"] for row in first), "the next main has the best value"
    assert len(told) == 1, "it is told once, and not at each epoch"


def test_a_value_that_only_main_sets_outlives_it_within_an_epoch(ways: Ways):
    ways.say("hurry")
    with ways.job("best_on_main_within_an_epoch", 2) as job:
        job.wait(lambda e: any("job.state['best'] differed between the workers" in n for n in notes(job)))
        ways.say("die")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert ways.rows()["w1"] == [{"best": 0.5}]


def test_values_that_differ_in_every_step_are_given_to_all_ever_less_often(ways: Ways):
    ways.say("hurry")
    found = ways.run("own_sums", 2)
    assert [rows[-1]["step"] for rows in found.values()] == [120, 120]
    assert all(3 <= rows[-1]["given"] <= 7 for rows in found.values()), "after 2, 4, 8 ... steps"


def test_all_workers_stop_early_together_after_the_same_step(ways: Ways):
    ways.say("hurry")
    with ways.job("stop_together", 2) as job:
        assert job.wait_end() == ev.JobFinished(15, "it stopped in epoch 2 of 4, after 15 steps")
        job.wait_gone(30)
    ends = [rows[-1] for rows in ways.rows().values()]
    assert len(ends) == 2
    assert ends[0] == ends[1]


def test_what_comes_before_the_epochs_is_not_done_again_by_newcomers_nor_after_a_restart(ways: Ways):
    with ways.job("first_lines", 2, keep_size=True) as job:
        job.wait_size(2)
        grow(job)
        until(lambda: (ways.directory / "checkpointed").exists())
        job.wait(lambda e: isinstance(e, ev.Checkpointed))
        for worker in ("w0", "w1", "w2"):
            job.kill(worker)
        job.wait(lambda e: isinstance(e, ev.GenerationCommitted) and e.kind is Kind.FIRST and e.step > 0)
        ways.say("go on")
        ways.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    found = ways.rows()
    starts = {worker: rows[0] for worker, rows in found.items()}
    assert starts["w0"] == {"first": True, "main": True}
    assert starts["w1"] == {"first": True, "main": False}
    assert starts["w2"] == {"first": False, "main": False}, "a newcomer"
    assert starts["w3"] == {"first": False, "main": True}, "the job was resumed"
    assert starts["w4"] == {"first": False, "main": False}
    everything = [row for rows in found.values() for row in rows]
    assert [row for row in everything if "logger" in row] == [{"logger": True}]
    assert [row for row in everything if "once" in row] == [{"once": 0}]
    lines = (ways.directory / "log.csv").read_text().split()
    assert lines[0] == "epoch"
    assert sorted({json.loads(line) for line in lines[1:]}) == list(range(6))
