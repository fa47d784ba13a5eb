"""Sharing and pre-scheduling in whole runs: small ones by hand, random ones by what must hold."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import InputError
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.preschedule import PreRule
from shoal.placement.sharing import SharingRule
from shoal.policies.registry import make_policy
from shoal.scheduler.sharing.colocation import Need
from shoal.scheduler.sharing.prescheduling import Phases
from shoal.sim.inputs.needs_file import read_uses
from shoal.sim.runner import Setup, load, remarks
from shoal.sim.samples import sample_path
from shoal.sim.sharing_simulation import SharingSimulation, Use
from shoal.sim.summary import waited_s

from .small import PROFILES, job, simulate


def run(
    jobs, *, utilisation=0.5, pre_s=0.0, post_s=0.0, gpus=1, policy="fifo", share=True, early=False,
    until_s=np.inf, **more
):  # fmt: skip
    use = Use(Need(4_000, utilisation), Phases(pre_s, post_s))
    simulation = SharingSimulation(
        jobs, PROFILES, more.pop("cluster", None) or Cluster.pool(gpus), make_policy(policy),
        uses=dict.fromkeys(PROFILES, use),
        share=SharingRule() if share else None,
        early=PreRule() if early else None,
        **more,
    )  # fmt: skip
    return simulation.run(lambda now_s, *_: now_s < until_s, every=1)


@pytest.mark.parametrize(
    ("utilisation", "ends"),
    [
        (0.5, [100.0, 100.0]),  # both at full speed
        (0.6, [120.0, 120.0]),  # together they want 120 %
        (0.65, [100.0, 200.0]),  # 130 % is not below the limit: one after the other
    ],
)
def test_two_jobs_on_one_gpu_are_as_fast_as_their_utilisations_allow(utilisation, ends):
    record = run([job("a", 0, 100.0), job("b", 0, 100.0)], utilisation=utilisation)
    assert record.finish_s.tolist() == pytest.approx(ends)


def test_a_guest_comes_and_goes_and_the_host_is_slower_only_meanwhile():
    record = run([job("host", 0, 100.0), job("guest", 40, 10.0)], utilisation=0.6)
    # 40 alone; the guest's 10 take 12 s, in which the host does 10; then 50 more alone.
    assert record.finish_s.tolist() == pytest.approx([102.0, 52.0])
    assert record.wait_s.tolist() == [0.0, 0.0]
    assert record.extra["sharing"]["guests"] == 1
    assert record.extra["sharing"]["guest_s"] == pytest.approx(12.0)


def test_a_guest_goes_on_with_a_gpu_of_its_own_when_its_host_ends():
    record = run([job("host", 0, 60.0), job("guest", 0, 100.0), job("late", 70, 10.0)], utilisation=0.6)
    # Both at 1/1.2 until the host ends at 72; the guest has done 60, and hosts the late one until 82.
    assert record.finish_s[0] == pytest.approx(72.0)
    assert record.finish_s[2] == pytest.approx(72.0 + 12.0)
    assert record.finish_s[1] == pytest.approx(84.0 + (100 - 60 - 10))
    assert record.gpu_s[0] == pytest.approx(72.0)


def log_of(record, name):
    """What the log says of a job: (time, its GPUs from then on, whether as a guest or after having been one)."""
    log = zip(record.change_s, record.change_job, record.change_gpus)
    return [
        (pytest.approx(at_s), gpus, i in record.colocation_changes)
        for i, (at_s, j, gpus) in enumerate(log)
        if record.jobs[j].name == name
    ]


TAKES_TURNS = [job("host", 0, 60.0), job("guest", 0, 100.0), job("late", 70, 10.0)]
#: The short one takes the GPU at 40: its owner becomes its guest, and whose guest that was has to leave until 46.
IS_SENT_AWAY = [job("host", 0, 100.0), job("guest", 10, 190.0), job("short", 40, 5.0)]


@pytest.mark.parametrize(
    ("jobs", "policy", "name", "log"),
    [
        (
            [job("host", 0, 100.0), job("guest", 40, 10.0)],
            "fifo",
            "guest",
            [(40.0, 1, True), (52.0, 0, False)],
        ),
        (
            [job("host", 0, 100.0), job("guest", 40, 10.0)],
            "fifo",
            "host",
            [(0.0, 1, False), (102.0, 0, False)],
        ),
        (TAKES_TURNS, "fifo", "guest", [(0.0, 1, True), (72.0, 1, False), (114.0, 0, False)]),
        (TAKES_TURNS, "fifo", "late", [(72.0, 1, True), (84.0, 0, False)]),
        (
            IS_SENT_AWAY,
            "srtf",
            "guest",
            [(10.0, 1, True), (40.0, 0, True), (46.0, 1, True), (118.0, 1, False), (223.0, 0, False)],
        ),
        (
            IS_SENT_AWAY,
            "srtf",
            "host",
            [(0.0, 1, False), (40.0, 0, False), (40.0, 1, True), (46.0, 1, False), (118.0, 0, False)],
        ),
    ],
    ids=[
        "a guest that ends as one",
        "its host notices nothing",
        "a guest that gets the GPU of its host",
        "a guest of the former guest",
        "a guest that has to leave and comes back",
        "a host that becomes a guest itself",
    ],
)
def test_the_log_tells_when_a_job_was_a_guest(jobs, policy, name, log):
    record = run(jobs, utilisation=0.6, policy=policy)
    assert log_of(record, name) == log
    assert max(record.used) == 1
    unlogged = run(jobs, utilisation=0.6, policy=policy, timeline=False)
    assert unlogged.change_s == unlogged.colocation_changes == []


def test_who_is_a_guest_when_a_run_is_broken_off_does_not_wait_and_who_had_to_leave_does():
    record = run(IS_SENT_AWAY, utilisation=0.6, policy="srtf", until_s=40.0)
    record.end_s = 45.0
    assert waited_s(record).tolist() == pytest.approx([0.0, 5.0, 0.0])


def test_the_next_job_has_prepared_when_it_gets_the_gpu():
    jobs = [job("a", 0, 100.0), job("b", 0, 100.0)]
    plain = run(jobs, pre_s=20, post_s=5, share=False)
    early = run(jobs, pre_s=20, post_s=5, share=False, early=True)
    assert plain.finish_s.tolist() == pytest.approx([125.0, 250.0])
    assert early.finish_s.tolist() == pytest.approx([125.0, 230.0])
    assert early.extra["sharing"]["prepared_early_s"] == pytest.approx(20.0)


def test_who_prepared_on_another_node_prepares_again():
    jobs = [job("a", 0, 30.0), job("b", 0, 31.0), job("c", 0, 50.0), job("e", 49, 5.0)]
    record = run(
        jobs, pre_s=20, share=False, early=True, policy="srtf", cluster=Cluster.of(2, 1), placer=KeepAndPack()
    )
    # c prepares beside a on the first node, e beside b on the second. At 50 the first is free, and e is the
    # shortest: what it prepared is elsewhere. c moves over to the second, where it has one second until 51.
    assert record.finish_s.tolist() == pytest.approx([50.0, 51.0, 51 + 20 - 1 + 50, 50 + 20 + 5])
    assert record.extra["sharing"]["launched_early"] == 3
    assert record.extra["sharing"]["prepared_early_s"] == pytest.approx(1.0)


@pytest.mark.parametrize("policy", ["fifo", "srtf", "afs-p", "max-min", "optimus"])
@pytest.mark.parametrize("nodes", [False, True])
def test_every_job_does_all_its_work_and_sharing_never_makes_the_makespan_much_longer(policy, nodes):
    rng = np.random.default_rng(4)
    at = np.sort(rng.uniform(0, 300, 50))
    jobs = [
        job(f"j{i}", float(at[i]), float(rng.integers(5, 200)), gpus=int(rng.choice([1, 1, 1, 2])), most=2)
        for i in range(50)
    ]
    cluster = Cluster.of(2, 2) if nodes else Cluster.pool(4)
    kwargs = {"cluster": cluster, "policy": policy}
    if nodes:
        kwargs["placer"] = KeepAndPack(all_or_nothing=not make_policy(policy).elastic)
    shared = run(jobs, utilisation=0.4, pre_s=3.0, post_s=1.0, early=True, **kwargs)
    assert np.isfinite(shared.finish_s).all()
    fastest = np.array([j.iterations / j.gpus.max for j in jobs])
    assert (shared.finish_s - at >= fastest - 1e-9).all(), "no one is faster than its work allows"
    alone = simulate(jobs, policy, cluster=cluster, **({"placer": kwargs["placer"]} if nodes else {}))
    assert shared.finish_s.max() < 1.5 * alone.finish_s.max()
    assert shared.extra["sharing"]["guests"] > 0


def test_guests_end_jobs_sooner_on_average_when_gpus_are_half_used():
    rng = np.random.default_rng(5)
    jobs = [job(f"j{i}", 2.0 * i, float(rng.integers(20, 80))) for i in range(40)]
    shared, alone = run(jobs, gpus=4, utilisation=0.4), run(jobs, gpus=4, share=False)
    assert shared.finish_s.mean() < 0.7 * alone.finish_s.mean()


MODELS = ("a", "b", "m", "resnet")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model,gpu_util\nm,50\n", "gpu_mem_mb"),
        ("model,gpu_util,gpu_mem_mb\n", "no models"),
        ("model,gpu_util,gpu_mem_mb\nm,150,100\n", "per cent"),
        ("model,gpu_util,gpu_mem_mb\nm,x,100\n", "not a number"),
        ("model,gpu_util,gpu_mem_mb\nm,50,0\n", "above 0"),
        ("model,gpu_util,gpu_mem_mb\nm,50,10\nm,50,10\n", "twice"),
        ("model,gpu_util,gpu_mem_mb,pre_s\nm,50,10,-1\n", "negative"),
        ("", "is empty; a table of GPU use needs a header"),
        (
            "model,gpu_util,gpu_mem_mb\nm,50,10\nresnett,50,10\n",
            r"needs.csv:3: model: no profile is of model 'resnett'; did you mean 'resnet'\?$",
        ),
        ("model,gpu_util,gpu_mem_mb\nzzz,50,10\n", "needs.csv:2: model: .* 'zzz'; known: a, b, m, resnet$"),
    ],
    ids=[
        "a column is missing", "no rows", "more than all of a GPU", "a word for a number", "no memory",
        "a model twice", "a time below 0", "an empty file", "a misspelt model", "a model of another cluster",
    ],
)  # fmt: skip
def test_bad_needs_are_told_with_their_place(tmp_path, text, told):
    (tmp_path / "needs.csv").write_text(text)
    with pytest.raises(InputError, match=told):
        read_uses(tmp_path / "needs.csv", MODELS)


def test_needs_are_read(tmp_path):
    (tmp_path / "needs.csv").write_text("model,gpu_util,gpu_mem_mb,pre_s\na,50,4096,7\nb,80,100,\n")
    assert read_uses(tmp_path / "needs.csv", MODELS) == {
        "a": Use(Need(4096.0, 0.5), Phases(7.0, 0.0)),
        "b": Use(Need(100.0, 0.8), Phases(0.0, 0.0)),
    }


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("ab", None),
        ("a", "no needs are known for 1 of 3 jobs, which neither share a GPU nor prepare early: .* name b$"),
        ("b", "no needs are known for 2 of 3 jobs, .*: --needs does not name a$"),
        ("", "no needs are known for 3 of 3 jobs, .*: --needs does not name a and b$"),
    ],
    ids=["every model is named", "one job is left", "two jobs of a model are left", "no job is named"],
)
def test_a_run_says_how_many_jobs_have_no_needs(tmp_path, named, told):
    (tmp_path / "p.csv").write_text(
        "model,gpus,seconds_per_iteration\n" + "".join(f"{m},1,1\n" for m in "abc")
    )
    header = "submit_s,model,iterations,requested_gpus,max_gpus\n"
    (tmp_path / "jobs.csv").write_text(header + "".join(f"0,{model},10,1,1\n" for model in "aba"))
    needs = "".join(f"{model},40,4000\n" for model in named + "c")
    (tmp_path / "needs.csv").write_text("model,gpu_util,gpu_mem_mb\n" + needs)
    setup = Setup(
        tmp_path / "jobs.csv", tmp_path / "p.csv", "fifo", gpus=1, needs=tmp_path / "needs.csv", share=True
    )
    said = remarks(setup, load(setup))
    assert len(said) == (told is not None)
    assert told is None or re.match(told, said[0])


def test_a_misspelt_model_of_the_needs_is_found_before_anything_runs(tmp_path):
    (tmp_path / "needs.csv").write_text("model,gpu_util,gpu_mem_mb\nnobody,40,4000\n")
    setup = Setup(
        sample_path("jobs.csv"), sample_path("profiles.csv"), "fifo", gpus=64, needs=tmp_path / "needs.csv"
    )
    with pytest.raises(InputError, match=r"needs.csv:2: model: no profile is of model 'nobody'"):
        load(setup)
