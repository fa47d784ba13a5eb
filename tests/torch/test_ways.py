"""Real processes: the ways in which people train, resized, give what one process gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from elastic_lab import until
from way_lab import Rows, Ways, grow, grow_and_shrink

from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev


@pytest.fixture
def ways(tmp_path: Path, zygote: Zygote) -> Ways:
    return Ways(tmp_path, zygote)


@pytest.mark.parametrize("kind", ["plain", "accumulate", "ahead", "sum"])
def test_token_weights_are_exact_over_uneven_parts_at_any_size(ways: Ways, kind: str):
    alone = ways.alone("tokens", TOKENS=kind)[-1]
    found = ways.run("tokens", 2, grow_and_shrink, TOKENS=kind)
    for worker in ("w0", "w1"):
        assert found[worker][-1]["step"] == alone["step"]
        assert found[worker][-1]["final"] == pytest.approx(alone["final"], abs=1e-5)
    assert {row["size"] for row in found["w0"][:-1]} == {2, 3}


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_alternating_updates_of_two_models_are_those_of_one_process_over_resizes(ways: Ways, loss: str):
    alone = ways.alone("gan", LOSS=loss)[-1]
    found = ways.run("gan", 2, grow_and_shrink, LOSS=loss)
    for worker in ("w0", "w1"):
        final = found[worker][-1]
        assert final["final"] == pytest.approx(alone["final"], abs=1e-4)
        assert (final["step"], final["count"]) == (alone["step"], alone["count"])
        assert final["rates"] == alone["rates"], "the schedules of job.wrap have travelled"
    assert {row["size"] for row in found["w0"][:-1]} == {2, 3}


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_gradients_that_a_script_adds_up_over_batches_are_those_of_one_process(ways: Ways, loss: str):
    alone = ways.alone("by_hand", LOSS=loss)[-1]
    found = ways.run("by_hand", 2, grow_and_shrink, LOSS=loss)
    for worker in ("w0", "w1"):
        assert found[worker][-1]["final"] == pytest.approx(alone["final"], abs=1e-4)
        assert found[worker][-1]["step"] == alone["step"]
    assert {row["size"] for row in found["w0"][:-1]} == {2, 3}


def test_layers_that_are_frozen_during_the_training_are_frozen_in_newcomers_too(ways: Ways):
    alone = ways.alone("freezes")[-1]

    def story(job: LocalJob) -> None:
        until(lambda: any(row["epoch"] == 3 for row in ways.rows().get("w0", ())))
        grow(job)

    found = ways.run("freezes", 2, story)
    for worker in ("w0", "w1", "w2"):
        final = found[worker][-1]
        assert final["first"] == pytest.approx(alone["first"], abs=1e-5)
        assert final["final"] == pytest.approx(alone["final"], abs=1e-5)
    assert {row["size"] for row in found["w0"][:-1]} == {2, 3}


def test_a_worker_that_dies_between_two_updates_of_one_step_leaves_no_trace(ways: Ways):
    alone = ways.alone("gan")[-1]

    def story(job: LocalJob) -> None:
        ways.say("die")
        job.wait(lambda e: isinstance(e, ev.WorkerLost))

    found = ways.run("gan", 2, story, DIE_AT="20")
    final = found["w0"][-1]
    assert final["final"] == pytest.approx(alone["final"], abs=1e-4)
    assert (final["step"], final["count"], final["rates"]) == (alone["step"], alone["count"], alone["rates"])


@pytest.mark.parametrize("dies", [False, True])
def test_all_workers_evaluate_every_sample_once_and_decide_together(ways: Ways, dies: bool):
    alone = ways.alone("evaluated")

    def story(job: LocalJob) -> None:
        grow(job)
        until(lambda: any(row["size"] == 3 for row in ways.rows().get("w0", ())))
        if dies:
            ways.say("dies")
            job.wait(lambda e: isinstance(e, ev.WorkerLost))
        else:
            job.resize(1)
            job.wait_size(1)

    found = ways.run("evaluated", 2, story)
    epochs = [row for row in found["w0"] if "error" in row]
    assert len(epochs) == len(alone) - 1
    for row, want in zip(epochs, alone):
        assert row["seen"] == list(range(101))
        assert row["error"] == pytest.approx(want["error"], abs=1e-6)
        assert row["rate"] == want["rate"]
    assert alone[-1]["rate"] < 0.3, "the schedule has reduced the rate, so it is tested"
    assert {row["size"] for row in epochs} >= ({3, 2} if dies else {3, 1})
    last = [rows[-1] for rows in found.values() if "final" in rows[-1]]
    for final in last:
        assert final["final"] == pytest.approx(alone[-1]["final"], abs=1e-5)
        assert final["best"] == pytest.approx(alone[-1]["best"], abs=1e-6)
        assert final["epoch"] == alone[-1]["epoch"]


def test_reductions_are_exact_over_uneven_parts_and_equal_on_all_workers(ways: Ways):
    alone = ways.alone("reduced")
    ways.say("hurry")
    found = ways.run("reduced", 3)
    assert len(found) == 3
    for rows in found.values():
        for row, want in zip(rows, alone, strict=True):
            assert row["mean"] == pytest.approx(want["mean"], abs=1e-9)
            assert row["loss"] == pytest.approx(want["loss"], abs=1e-6)
            assert row["sum"] == want["sum"]
            assert row["gathered"] == want["gathered"]
            assert row["tensor"] == [want["tensor"][0], 3.0]
            assert (row["any"], want["any"]) == ([True, False], [False, False])
            assert row["broadcast"] == {"rank": 0}
            assert (row["made"], want["made"]) == ("w0", "alone")


def test_logged_values_are_means_over_the_workers(ways: Ways):
    alone = {row["step"]: row["loss"] for row in ways.alone("reduced")}
    with ways.job("reduced", 3) as job:
        job.wait_size(3)
        ways.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        logged = [
            value for _, e in job.events if isinstance(e, ev.Measured) for value in e.report.values.values()
        ]
    assert logged
    for value in logged:
        assert min(abs(value - loss) for loss in alone.values()) < 1e-6, "it is the mean loss of some step"


@pytest.mark.parametrize("weight", ["samples", "squares"])
def test_means_of_a_micro_batch_are_weighted_by_what_each_worker_has_of_it(ways: Ways, weight: str):
    alone = [row["mean"] for row in ways.alone("micro_means", WEIGHT=weight)]
    assert alone[1::2] == [31.0] * 3
    ways.say("hurry")
    with ways.job("micro_means", 2, WEIGHT=weight) as job:
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        logged = [v for _, e in job.events if isinstance(e, ev.Measured) for v in e.report.values.values()]
    assert len(ways.rows()) == 2
    for rows in ways.rows().values():
        assert [row["mean"] for row in rows] == pytest.approx(alone)
    assert set(logged) == {31.0}


def test_any_number_of_logged_values_is_reported_also_those_of_the_last_step(ways: Ways):
    ways.say("hurry")
    with ways.job("many_logs", 2) as job:
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
        last = {k: v for _, e in job.events if isinstance(e, ev.Measured) for k, v in e.report.values.items()}
    assert last.pop("final") == 7.0
    assert last.pop("loss") > 0
    assert last == dict.fromkeys(("count", "flag", *(f"value {i}" for i in range(40))), 0.5)


def test_a_mean_after_an_evaluation_is_weighted_by_the_samples_of_the_evaluation(ways: Ways):
    ways.say("hurry")
    found = ways.run("weighted_means", 2)
    for rows in found.values():
        assert {row["within"] for row in rows if "within" in row} == {15.0}
        assert [(row["left"], row["evaluated"]) for row in rows if "left" in row] == [(15.0, 15.0)] * 2


@pytest.mark.parametrize("dies", ["within", "after"])
def test_an_evaluation_is_exact_when_a_worker_dies_before_or_after_its_end(ways: Ways, dies: str):
    ways.say("hurry")
    found = ways.run("lost_in_evaluate", 2, DIES=dies)
    assert len(found["w0"]) == 3
    for row in found["w0"]:
        assert (row["mean"], row["ones"]) == (15.0, 1.0)
        assert sorted(i for part in row["all"] for i in part) == list(range(31))


BACKENDS = ["eager", "inductor"] if shutil.which("g++") else ["eager"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resize_does_not_compile_again(ways: Ways, backend: str):
    env = {"BACKEND": backend, "TORCHINDUCTOR_CACHE_DIR": str(ways.directory / "inductor")}
    alone = ways.alone("compiled", **env)
    # A newcomer compiles its first step, while the others wait for it.
    found = ways.run("compiled", 2, grow_and_shrink, hang_s=120.0, **env)
    for worker in ("w0", "w1"):
        steps = found[worker][:-1]
        graphs = {size: {row["graphs"] for row in steps if row["size"] == size} for size in (2, 3)}
        assert graphs[2] == graphs[3] == {1}, f"graphs by the number of workers: {graphs}"
        assert len({row["part"] for row in steps}) > 2, "parts had several sizes"
    want = {row["step"]: row["loss"] for row in alone[:-1]}
    have = {row["step"]: row["loss"] for row in found["w0"][:-1]}
    apart = {s: (have[s], want[s]) for s in have if abs(have[s] - want[s]) > 1e-5}
    assert not apart


@pytest.mark.parametrize("option", ["drop_last", "persistent_workers", "sampler", "weighted", "collate_fn"])
def test_options_of_a_loader_mean_what_they_mean_in_one_process(ways: Ways, option: str):
    alone = ways.alone("options", OPTION=option)
    found = ways.run("options", 2, grow, OPTION=option)
    assert samples_by_step(found) == samples_by_step({"alone": alone})
    assert found["w0"][-1]["final"] == pytest.approx(alone[-1]["final"], abs=1e-5)
    lengths = {"drop_last": 112, "weighted": 60}
    assert sum(len(row["ids"]) for row in alone if row.get("epoch") == 0) == lengths.get(option, 120)
    if option == "sampler":
        assert [i for row in alone if row.get("epoch") == 1 for i in row["ids"]][:3] == [119, 119, 117]
    if option == "collate_fn":
        assert alone[0]["rest"] == ["collated"]


def samples_by_step(found: Rows) -> dict[int, list[int]]:
    by_step: dict[int, list[int]] = {}
    for row in (row for rows in found.values() for row in rows if "ids" in row):
        by_step.setdefault(row["step"], []).extend(row["ids"])
    return {step: sorted(ids) for step, ids in sorted(by_step.items())}
