"""Speed by where a job is: measured placements, layouts of parameter servers, and how broken up the cluster is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.plan import Reconfigure, Share
from shoal.core.profile import Profile
from shoal.placement.fragmentation import fragmentation
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.placer import Placed
from shoal.placement.ps_speed import LAYOUT_TIME_S
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation
from shoal.sim.fragmentation_meter import FragmentationMeter
from shoal.sim.runner import Setup, run

#: One iteration per second with two workers, packed; a second server adds nothing, so none is given.
ONE_TO_TWO = Profile.of_servers("vgg16", np.array([[0.6, 1.0], [0.6, 1.0]]))


class Put:
    """A placer that puts the one job there is in a given place."""

    def __init__(self, placement):
        self.placement = placement

    def place(self, view, decision, supply, current):
        return Placed({0: self.placement}) if len(view) and not current else Placed({})


@pytest.mark.parametrize("model", sorted(LAYOUT_TIME_S))
@pytest.mark.parametrize(
    ("placement", "apart", "layout"),
    [
        (((0, 2),), False, "pww"),
        (((0, 1), (1, 1)), False, "pw:w"),
        (((0, 2),), True, "p:ww"),
        (((0, 1), (1, 1)), True, "p:w:w"),
    ],
)
def test_a_job_of_one_server_and_two_workers_takes_what_liquid_measured(model, placement, apart, layout):
    times = LAYOUT_TIME_S[model]
    job = Job("a", 0.0, GpuRange(2, 2), 2, model=model, iterations=times["pww"], kind=Kind.PARAMETER_SERVER)
    simulation = Simulation(
        [job], {model: replace(ONE_TO_TWO, model=model)}, Cluster.of(2, 2), make_policy("optimus"),
        placer=Put(placement), servers_apart=apart,
    )  # fmt: skip
    assert simulation.run().finish_s.tolist() == pytest.approx([times[layout]])


def test_a_parameter_server_job_with_a_plain_profile_is_slowed_too_unless_nodes_were_measured():
    job = Job("a", 0.0, GpuRange(4, 4), 4, model="resnet50", iterations=100.0, kind=Kind.PARAMETER_SERVER)
    plain = Profile.of("resnet50", {4: 1.0})
    measured = Profile.from_rows("resnet50", [("*", 4, 1, 1.0), ("*", 4, 2, 1.5)])

    def finish(profile, placement):
        cluster = Cluster.of(2, 4)
        return Simulation(
            [job], {"resnet50": profile}, cluster, make_policy("fifo"), placer=Put(placement)
        ).run().finish_s[0]  # fmt: skip

    spread = ((0, 2), (1, 2))
    assert finish(plain, ((0, 4),)) == 100.0
    assert finish(plain, spread) > 110.0
    assert finish(measured, spread) == pytest.approx(150.0)


def test_all_reduce_jobs_and_pools_know_nothing_of_servers():
    job = Job("a", 0.0, GpuRange(4, 4), 4, model="resnet50", iterations=100.0)
    profiles = {"resnet50": Profile.of("resnet50", {4: 1.0})}
    spread = Simulation(
        [job], profiles, Cluster.of(2, 4), make_policy("fifo"), placer=Put(((0, 2), (1, 2)))
    )  # fmt: skip
    assert spread.run().finish_s[0] == 100.0
    server = Job("a", 0.0, GpuRange(4, 4), 4, model="resnet50", iterations=100.0, kind=Kind.PARAMETER_SERVER)
    assert Simulation([server], profiles, Cluster.pool(4), make_policy("fifo")).run().finish_s[0] == 100.0


def test_the_nodes_column_of_profiles_csv_decides_how_long_a_job_takes(tmp_path):
    """Two jobs of 2 GPUs on nodes of 3: the first packed, the second packed too, the third spans two nodes."""
    (tmp_path / "profiles.csv").write_text(
        "model,gpus,seconds_per_iteration,nodes\nm,1,2.0,1\nm,2,1.0,1\nm,2,3.0,2\n"
    )
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {count: 2, gpus: 3}\n")
    head = "submit_s,model,iterations,requested_gpus,max_gpus,min_gpus\n"
    (tmp_path / "jobs.csv").write_text(head + "0,m,100,2,2,2\n" * 3)
    setup = Setup(tmp_path / "jobs.csv", tmp_path / "profiles.csv", "fifo", cluster=tmp_path / "cluster.yaml")
    result = run(setup)
    assert result.record.finish_s.tolist() == pytest.approx([100.0, 100.0, 300.0])
    # Until 100 all six GPUs are in use and two of them by the job that is spread; then two by that alone.
    figures = result.summary
    assert figures["spread"] == pytest.approx((2 * 300) / (6 * 100 + 2 * 200))
    assert figures["moves"] == 0
    # From 100 on each node has 2 of 3 free, so that both hold a job of two and nothing is stranded.
    assert figures["fragmentation"] == {"2": 0.0}
    moved = run(Setup(setup.jobs, setup.profiles, "fifo", cluster=setup.cluster, placement="moving"))
    assert moved.record.finish_s[2] == pytest.approx(100 + (100 - 100 / 3))
    assert moved.summary["moves"] == 1


def test_a_pool_has_no_such_figures(tmp_path):
    (tmp_path / "profiles.csv").write_text("model,gpus,seconds_per_iteration\nm,1,2.0\n")
    (tmp_path / "jobs.csv").write_text("submit_s,model,iterations,requested_gpus,max_gpus\n0,m,100,1,1\n")
    figures = run(Setup(tmp_path / "jobs.csv", tmp_path / "profiles.csv", "fifo", gpus=2)).summary
    assert not {"fragmentation", "spread", "moves"} & set(figures)


def test_the_meter_averages_the_figure_of_fragmentation_over_time():
    cluster = Cluster.of(3, 4)
    meter = FragmentationMeter(cluster)

    def put(job, *placement, verb="start"):
        gpus = sum(g for _, g in placement)
        meter.observe(Reconfigure(job, 1, Share(gpus, "gpu"), placement, verb, 0))

    meter.settle(0.0)
    put(0, (0, 3))
    put(1, (1, 1), (2, 1))
    meter.settle(10.0)  # free 1, 3, 3 for 10 s
    meter.forget(0)
    meter.settle(20.0)  # free 4, 3, 3 for 10 s
    first, second = np.array([1, 3, 3]), np.array([4, 3, 3])
    for size in (2, 4):
        weighed = (7 * fragmentation(first, size) + 10 * fragmentation(second, size)) / 17
        assert meter.figures()["fragmentation"][str(size)] == pytest.approx(weighed)
    assert meter.figures()["spread"] == pytest.approx((2 * 20) / (5 * 10 + 2 * 10))
    put(1, (1, 2), verb="migrate")
    assert meter.figures()["moves"] == 1


@pytest.mark.parametrize("policy", ["afs-p", "gandiva-fair"])
def test_the_meter_sees_what_the_scheduler_has_at_every_moment(policy):
    """The free GPUs it keeps up to date equal those counted from the scheduler's own placements."""
    cluster = Cluster.of(3, 4)
    rng = np.random.default_rng(2)
    profile = Profile.of("m", {n: 1.0 / n for n in range(1, 9)})
    jobs = [
        Job(f"j{i}", 20.0 * i, GpuRange(1, 6), 2, model="m", iterations=float(rng.integers(20, 400)))
        for i in range(30)
    ]
    chosen = make_policy(policy)
    simulation = Simulation(
        jobs, {"m": profile}, cluster, chosen, placer=KeepAndPack(all_or_nothing=not chosen.elastic)
    )
    seen = []

    def after(now):
        free = cluster.gpus_of_node.copy()
        for placement in simulation.scheduler.placements.values():
            for node, gpus in placement:
                free[node] -= gpus
        np.testing.assert_array_equal(simulation._meter._free, free)
        seen.append(now)
        return np.inf

    simulation._after_plan = after
    simulation.run()
    assert len(seen) > 30
