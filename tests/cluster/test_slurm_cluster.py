"""A whole cluster on a real Slurm: from `shoal up --engine slurm` to `shoal down`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.shoal_home import ShoalHome
from engines.slurm_cluster import SlurmCluster, need_slurm, tracking

from . import on_the_path, one_owner, stories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    need_slurm()
    started = SlurmCluster(types=("a100", "a100"), proctrack=tracking(), grace_s=10)
    yield started
    started.stop()


@pytest.fixture
def home_of() -> Iterator[Callable[[SlurmCluster], ShoalHome]]:
    # Short: the workers of a job have sockets below it.
    directory = Path(tempfile.mkdtemp(prefix="sh-"))
    made: list[ShoalHome] = []

    def make(slurm: SlurmCluster) -> ShoalHome:
        # As root, without the commands that become another user first: nobody else may read this Python.
        made.append(ShoalHome(directory / "home", slurm.environ | {"PATH": os.environ["PATH"]}))
        return made[-1]

    yield make
    for home in made:
        home.shoal("down", "-y", code=None)
    shutil.rmtree(directory)


@pytest.fixture
def home(slurm: SlurmCluster, home_of: Callable[[SlurmCluster], ShoalHome]) -> ShoalHome:
    return home_of(slurm)


#: Each machine takes all CPUs of its node, so that there are two of them.
UP = (
    *("--engine", "slurm", "--partition", "polite", "--gpus-per-node", "2"),
    *("--sbatch-option=--cpus-per-task=8", "--gpus", "2", "--idle", "10s", "--policy", "max-min"),
)


def machines(slurm: SlurmCluster) -> list[str]:
    return slurm.admin("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()


def test_jobs_get_machines_keep_them_over_every_loss_and_return_them(
    slurm: SlurmCluster, home: ShoalHome
) -> None:
    home.up(*UP, "--nodes", "0..2")
    assert not slurm.jobs(), "no machine is requested before a job needs one"

    # While Slurm has no node to give, `why` quotes its reason.
    slurm.admin("scontrol", "update", "NodeName=g1,g2", "State=DRAIN", "Reason=maintenance")
    with on_the_path.overheard(home) as password:
        stories.submit_gang(home, 4, password)
        home.until(lambda: "is pending there (" in home.shoal("why", "gang").stdout, "why quotes Slurm")
        assert "2 machines requested from Slurm; job " in home.shoal("why", "gang").stdout
        slurm.admin("scontrol", "update", "NodeName=g1,g2", "State=RESUME")
        stories.the_gang_spans_machines(home, 4)
        refused = home.shoal("run", "-d", "--gpus", 8, "--", "true", code=7)
        assert "it needs 8 GPUs of one type and this cluster has 4" in refused.stderr
        stories.a_job_over_machines_ends_as_on_one(home, 4)
    home.train("bert", "1..4")
    home.size("bert", 4)
    home.trains_on("bert")
    assert len({node for node, _ in home.gpus_of("bert").values()}) == 2
    assert {n.engine.split()[0] for n in home.ready(2)} == {"job"}, "node ls shows Slurm's view"
    stories.no_gpu_is_used_twice(home, "bert")

    killed = stories.a_killed_agent_is_replaced(home, "bert")
    one_owner.a_killed_server_is_replaced(home, "bert")

    # Somebody cancels the machine whose agent was killed: its keepers are no children of it. The job shrinks and does
    # not fail, and another machine replaces it when the keepers and their workers are dead.
    before, (job,) = home.workers("bert"), [n.engine.split()[1] for n in home.nodes() if n.name == killed]
    with stories.logs_survive(home, "bert", killed):
        slurm.admin("scancel", job)
        home.size("bert", 2)
        home.trains_on("bert")
    stories.grows_back_after_their_end(home, "bert", 4, before, killed)

    # A time limit comes near: its jobs leave the machine before it goes. It is extended: they use it again.
    first = machines(slurm)[0]
    slurm.admin("scontrol", "update", f"JobId={first}", "EndTime=now+120seconds")
    home.until(lambda: home.nodes("leaving"), "the machine is leaving")
    leaving = home.nodes("leaving")[0].name
    home.until(lambda: leaving not in [n for n, _ in home.gpus_of("bert").values()], "bert left it")
    home.trains_on("bert")
    slurm.admin("scontrol", "update", f"JobId={first}", "TimeLimit=60")
    home.until(lambda: leaving in [n for n, _ in home.gpus_of("bert").values()], "bert uses it again")
    home.size("bert", 4)
    what_slurm_takes_is_left_before(slurm, home, first)

    # Pause, replace every machine, and go on from the same step.
    step = stories.pause(home, "bert")
    slurm.admin("scancel", *slurm.jobs())
    home.until(lambda: not home.nodes(), "all machines are gone")
    stories.resume(home, "bert", step)

    home.shoal("cancel", "-y", "bert")
    one_owner.a_suspended_gang_wakes_only_on_its_own_machine(home)
    one_owner.the_gpus_of_a_silent_machine_wait_for_its_lease(
        home, meanwhile=lambda: on_the_path.strangers_are_refused(home)
    )
    home.until(lambda: not slurm.jobs(), "idle machines are returned")
    home.down()
    stories.nothing_is_left(home)


def what_slurm_takes_is_left_before(slurm: SlurmCluster, home: ShoalHome, limited: str) -> None:
    """The time limit of one machine ends, and a more urgent job preempts the other. `bert` trains on both.

    It moves to the other machine, and when that goes too, its state is saved. It goes on at the same step.
    """
    slurm.admin("scontrol", "update", f"JobId={limited}", "EndTime=now+25seconds")
    home.until(lambda: home.nodes("leaving"), "the machine is leaving")
    home.size("bert", 2)
    home.trains_on("bert")
    (preempted,) = {*machines(slurm)} - {limited}
    (node,) = slurm.admin("squeue", "-h", "-j", preempted, "-o", "%N").split()
    with stories.state_is_kept(home, "bert"):
        options = ("--partition=urgent", f"--nodelist={node}", "--cpus-per-task=8", "--output=/dev/null")
        urgent = slurm.admin("sbatch", "--parsable", *options, "--wrap=sleep 1000").strip()
        home.until(lambda: not home.workers("bert"), "bert has saved its state")
        home.until(lambda: state_of(slurm, urgent) == "RUNNING", "the urgent job has the node")
        assert state_of(slurm, preempted) == "PENDING", "the machine was preempted"
        slurm.admin("scancel", urgent)
        home.until(lambda: state_of(slurm, limited) == "TIMEOUT", "the time limit has ended the machine")
        home.size("bert", 4)


def state_of(slurm: SlurmCluster, job: str) -> str:
    return slurm.admin("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()


def test_a_node_that_slurm_loses_never_gives_one_gpu_two_live_workers(
    slurm: SlurmCluster, home: ShoalHome
) -> None:
    home.up(*UP, "--nodes", "2..2", "--lease", f"{one_owner.SHORT_LEASE_S}s")
    home.ready(2)
    home.train("bert", "1..4")
    home.size("bert", 4)
    before = home.workers("bert")
    on = {w: node for w, (node, _) in home.gpus_of("bert").items()}
    (requeued,) = slurm.admin("squeue", "-h", "-w", "g2", "-o", "%i").split()
    slurm.kill_node("g2")
    assert stories.alive([*before.values()]) == [*before.values()], "workers do not end with slurmd"
    agents = home.agents()
    try:
        home.until(lambda: home.job("bert").gpus == 2, "bert left the node that Slurm lost")
        home.trains_on("bert")
        lost = [w for w in before if w not in home.gpus_of("bert")]
        assert len({on[w] for w in lost}) == 1
        assert home.agents() == agents, "the agent of the lost node runs on too"
    finally:
        slurm.start_node("g2")

    def is_whole_again() -> bool:
        stories.no_gpu_has_two_live_workers(home, "bert")
        return home.job("bert").gpus == 4

    home.until(is_whole_again, "bert has both nodes again")
    home.size("bert", 4)
    home.trains_on("bert")
    stories.no_gpu_is_used_twice(home, "bert")
    assert state_of(slurm, requeued) == "RUNNING", "the agent of the requeued job has joined again"
    assert not stories.alive([before[w] for w in lost]), "the old workers are dead"
    home.down()
    assert not slurm.jobs(), "shoal down leaves no batch job"
    stories.nothing_is_left(home)


def test_a_job_gets_a_machine_of_the_type_that_it_asks_for(
    home_of: Callable[[SlurmCluster], ShoalHome], tmp_path: Path
) -> None:
    slurm = SlurmCluster(types=("a100", "v100"))
    try:
        home = home_of(slurm)
        home.up(*UP, "--nodes", "0..2")
        for gpu_type, at in {"v100": "g2", "a100": "g1"}.items():
            job = {"name": gpu_type, "gpus": 1, "gpu_types": [gpu_type], "command": ["sleep", "1000"]}
            (tmp_path / "job.yaml").write_text(json.dumps(job))
            home.shoal("submit", "-d", "-y", "-f", tmp_path / "job.yaml")
            home.until(lambda name=gpu_type: home.job(name).state == "running", f"{gpu_type} runs")
            (worker,) = home.job(gpu_type).workers
            (node,) = [n for n in home.nodes() if n.name == worker.node]
            assert node.gpu_type == gpu_type
            home.until(
                lambda worker=worker, at=at: any(
                    n.name == worker.node and f" is up on {at}" in (n.engine or "") for n in home.nodes()
                ),
                f"node ls shows that Slurm has it up on {at}",
            )
        home.down()
        assert not slurm.jobs()
    finally:
        slurm.stop()


BAD = {
    "no such partition": (("--partition", "gold"), "invalid partition specified"),
    "an option of Ray": (("--ray-address", "auto"), "is for --engine ray"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_slurm_refuses_ends_shoal_up_with_one_line(home: ShoalHome, case: str) -> None:
    options, words = BAD[case]
    done = home.up("--engine", "slurm", *options, code=2)
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_without_slurm_shoal_up_says_where_to_run_it(home: ShoalHome, tmp_path: Path) -> None:
    home.env["PATH"] = str(tmp_path)
    done = home.up("--engine", "slurm", code=2)
    assert "on a login node" in done.stderr
