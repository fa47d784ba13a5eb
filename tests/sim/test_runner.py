"""From files and names to a run: placements by name, and requests left to the profile."""

from __future__ import annotations

import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.optimus_placer import OptimusPlacer
from shoal.policies.registry import make_policy
from shoal.sim.costs import Costs
from shoal.sim.runner import Setup, check, load, placer_for, run

NODES = "nodes:\n  - {count: 4, gpus: 4, type: gpu}\n"
HEAD = "submit_s,model,iterations,requested_gpus,max_gpus,min_gpus\n"


@pytest.fixture
def files(tmp_path):
    """Speed on two nodes is half; `steep` gains from every GPU, `flat` from two only."""
    rows = ["model,gpus,seconds_per_iteration,nodes"]
    for gpus in range(1, 9):
        rows.append(f"steep,{gpus},{1 / gpus},1" if gpus <= 4 else f"steep,{gpus},{2 / gpus},2")
        if gpus > 1:
            rows.append(f"flat,{gpus},{1 / min(gpus, 2)},1" if gpus <= 4 else f"flat,{gpus},0.5,2")
            if gpus <= 4:
                rows.append(f"steep,{gpus},{2 / gpus},2")
    rows.append("flat,1,1,1")
    (tmp_path / "profiles.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "cluster.yaml").write_text(NODES)
    (tmp_path / "jobs.csv").write_text(HEAD + "0,steep,100,1,4,1\n1,flat,100,4,4,1\n2,steep,100,4,4,2\n")
    return tmp_path


def setup(files, **more):
    return Setup(
        files / "jobs.csv", files / "profiles.csv", more.pop("policy", "fifo"),
        cluster=files / "cluster.yaml", **more,
    )  # fmt: skip


def test_jobs_request_what_is_worth_it_by_their_profile(files):
    assert [j.requested_gpus for j in load(setup(files)).jobs] == [1, 4, 4]
    assert [j.requested_gpus for j in load(setup(files, auto_gpus=True)).jobs] == [4, 2, 4]


def test_a_job_with_no_speed_on_one_gpu_keeps_its_request(files):
    (files / "profiles.csv").write_text("model,gpus,seconds_per_iteration\nlarge,4,1\nlarge,8,0.9\n")
    (files / "jobs.csv").write_text(HEAD + "0,large,100,8,8,4\n")
    assert load(setup(files, auto_gpus=True)).jobs[0].requested_gpus == 8


def test_the_policy_optimus_is_placed_by_its_own_rule_unless_told_otherwise(files):
    def placer(policy, **more):
        made = make_policy(policy)
        return type(placer_for(setup(files, policy=policy, **more), Cluster.of(4, 4), made, dict))

    assert placer("optimus") is OptimusPlacer
    assert placer("optimus", placement="keep-and-pack") is KeepAndPack
    assert placer("afs-p") is KeepAndPack


def test_a_placement_that_cannot_be_is_told_before_anything_runs(files):
    with pytest.raises(ShoalError, match="did you mean 'moving'"):
        check(setup(files, placement="movng"), Cluster.of(4, 4))
    with pytest.raises(ShoalError, match="needs nodes"):
        check(setup(files, placement="moving"), Cluster.pool(4))


def test_an_option_that_cannot_be_is_told_before_anything_runs(files):
    with pytest.raises(ShoalError, match="backfill"):
        check(setup(files, options={"backfill": "zz"}), Cluster.pool(4))


def test_moves_go_by_what_the_scheduler_believes_in_a_whole_run(files):
    """Two jobs leave GPUs free on two nodes; the third spans them until one of the first ends."""
    # Nodes of 4: a and b take 3 each of all but one GPU, so that d (2 GPUs) must span two nodes.
    lines = ["0,steep,900,3,3,3"] * 2 + ["0,steep,30000,4,4,4"] * 2 + ["1,steep,2000,2,2,2"]
    (files / "jobs.csv").write_text(HEAD + "\n".join(lines) + "\n")
    stays = run(setup(files, placement="keep-and-pack")).record.finish_s
    moves = run(setup(files, placement="moving")).record.finish_s
    assert stays[4] == 1 + 2000, "half the speed on two nodes"
    # At 300 the first two end; from then on it is whole: 299 done of 2000, then two iterations a second.
    assert moves[4] == pytest.approx(300 + (2000 - 299) / 2)
    costly = setup(files, placement="moving", costs=Costs("restart", restart_s=50.0))
    assert run(costly).record.finish_s[4] == pytest.approx(300 + 50 + (2000 - 299) / 2)
    no_gain = setup(files, placement="moving:horizon_s=60", costs=Costs("restart", restart_s=50.0))
    assert run(no_gain).record.finish_s[4] == 1 + 2000


def test_a_job_that_is_nearly_done_does_not_move_though_it_has_not_been_looked_at_since_it_started(files):
    """Progress is settled lazily: what counts is what is left now, not what was left at its last change."""
    # As above, but the job that spans two nodes has only 20 s of its 320 left when room appears at 300.
    lines = ["0,steep,900,3,3,3"] * 2 + ["0,steep,30000,4,4,4"] * 2 + ["1,steep,319,2,2,2"]
    (files / "jobs.csv").write_text(HEAD + "\n".join(lines) + "\n")
    result = run(setup(files, placement="moving", costs=Costs("restart", restart_s=50.0)))
    assert result.record.finish_s[4] == 1 + 319
    assert result.summary["moves"] == 0


@pytest.mark.parametrize("autoscale", ["", "efficiency:threshold=0.5"])
def test_jobs_with_a_step_have_multiples_of_it(files, autoscale):
    head = HEAD.replace("min_gpus", "min_gpus,step_gpus")
    (files / "jobs.csv").write_text(head + "0,steep,900,2,6,2,2\n1,flat,500,1,4,1,1\n2,steep,900,3,6,3,3\n")
    result = run(setup(files, policy="max-min", autoscale=autoscale))
    assert result.summary["finished"] == 3
    assert [job.gpus.step for job in result.inputs.jobs] == [2, 1, 3]
