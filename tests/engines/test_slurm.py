"""Machines from a real Slurm: slurmctld and two slurmd of 4 GPUs each, used by an ordinary user."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.base import (
    AgentCommand,
    EngineUnavailable,
    Machine,
    MachineRequest,
    MachineState,
    NewMachine,
    RequestRefused,
    describe_waiting,
)
from shoal.engines.slurm import SlurmEngine, SlurmOptions

from .slurm_cluster import USER, SlurmCluster, need_slurm, wait_for

pytestmark = pytest.mark.slow

A100 = MachineRequest(4, "a100")
ANY = MachineRequest(4)
UP, PENDING, LEAVING, GONE = MachineState.UP, MachineState.PENDING, MachineState.LEAVING, MachineState.GONE

#: Writes down what it sees, then lives until SIGTERM. In bash, because the job's user may not reach this Python.
AGENT = """
trap 'exit 0' TERM
out=$1/$SHOAL_ENGINE_ID token=$2 state=$3
echo "$4" >>"$state/runs"
write() {
  {
    for name in CUDA_VISIBLE_DEVICES SHOAL_NODE SHOAL_GPU_TYPE SHOAL_RACK COLOUR LOGIN_SECRET; do
      echo "$name=${!name-unset}"
    done
    echo "token=$(<"$token")"; echo "mode=$(stat -c %a "$token")"; echo "uid=$UID"; echo "pid=$$"
    echo "dir=${token%/*}"; echo "runs=$(tr '\\n' ' ' <"$state/runs")"
    [ -e "$SHOAL_LEAVING_FILE" ] && echo "leaving=$(<"$SHOAL_LEAVING_FILE")"
  } >"$out.new"
  mv "$out.new" "$out"
}
write
until [ -e "$SHOAL_LEAVING_FILE" ]; do sleep 0.1; done
write
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    need_slurm()
    started = SlurmCluster()
    (started.dir / "agent.sh").write_text(AGENT)
    yield started
    started.stop()


#: How far the controller's clock may be ahead of that of the server and of the nodes.
DAY_S = 86400


@pytest.fixture
def clock_ahead(cluster: SlurmCluster) -> Iterator[Callable[[int], None]]:
    yield cluster.set_clock_ahead
    cluster.set_clock_ahead(0)


@pytest.fixture
def tracked_by_cgroup(cluster: SlurmCluster) -> Iterator[None]:
    """As on real clusters. Slurm says so: to do it, this machine would need cgroups."""
    cluster.say(proctrack="cgroup")
    yield
    cluster.say(proctrack="linuxproc")


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    left = cluster.jobs()
    if left:
        cluster.admin("scancel", "--full", *left)
        wait_for(lambda: not cluster.jobs(), "jobs cancelled")
    assert not left, f"the test left jobs behind: {left}"


def agents(cluster: SlurmCluster, n: int) -> list[AgentCommand]:
    argv = ("bash", str(cluster.dir / "agent.sh"), str(cluster.out), "{dir}/token", "{state}", "{agent}")
    return [AgentCommand(argv, {"COLOUR": "it's $red"}, {"token": b"secret '$(id)"})] * n


def engine(cluster: SlurmCluster, home: str = "abc1", **options: Any) -> SlurmEngine:
    options.setdefault("log_dir", cluster.out)
    environ = dict(cluster.environ, LOGIN_SECRET="of the login node")
    return SlurmEngine(home, SlurmOptions(**options), environ=environ)


def seen(cluster: SlurmCluster, job: str) -> dict[str, Any]:
    path = cluster.out / job
    wait_for(path.exists, f"job {job} runs the agent command")
    found: dict[str, Any] = dict(line.split("=", 1) for line in path.read_text().splitlines())
    return found | {"pid": int(found["pid"])}


async def until(
    engine: SlurmEngine, condition: Callable[[list[Machine]], bool], timeout_s: float = 60.0
) -> list[Machine]:
    """Poll until the machines are so."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        machines = await engine.poll()
        if condition(machines):
            return machines
        assert time.monotonic() < deadline_s, machines
        await asyncio.sleep(0.1)


def states(machines: list[Machine]) -> list[MachineState]:
    return [m.state for m in machines]


def run(story: Awaitable[None]) -> None:
    async def main() -> None:
        await story

    asyncio.run(main())


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.usefixtures("tracked_by_cgroup")
def test_two_machines_run_the_agent_with_their_gpus_and_closing_leaves_nothing(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm = engine(cluster)
        assert (await slurm.version()).startswith("22.05")
        assert await slurm.offers() == [NewMachine(4), NewMachine(4, "a100"), NewMachine(4, "v100")]
        accepted = await slurm.request(ANY, agents(cluster, 2))
        assert [m.agent for m in accepted] == ["slurm-1", "slurm-2"]
        machines = await until(slurm, lambda ms: states(ms) == [UP, UP])
        assert {(m.node, m.gpus, m.gpu_type, m.rack) for m in machines} == {
            ("g1", 4, "a100", "rack0"),
            ("g2", 4, "v100", "rack1"),
        }
        running = [seen(cluster, m.id) for m in machines]
        for machine, found in zip(machines, running):
            assert found["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
            assert (found["SHOAL_NODE"], found["SHOAL_GPU_TYPE"], found["SHOAL_RACK"]) == (
                machine.node,
                machine.gpu_type,
                machine.rack,
            )
            assert found["uid"] == str(USER)
            assert (found["token"], found["mode"]) == ("secret '$(id)", "600")
            assert found["COLOUR"] == "it's $red"
            assert found["LOGIN_SECRET"] == "unset", (
                "the job does not inherit the environment of the login node"
            )
        killed = running[0]["pid"]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: seen(cluster, machines[0].id)["pid"] != killed, "a killed agent runs again")
        running[0] = seen(cluster, machines[0].id)
        assert running[0]["runs"].split() == [machines[0].agent] * 2, "with its state"
        await slurm.release(machines[0].id)
        after = await until(slurm, lambda ms: GONE in states(ms))
        assert (after[0].id, after[0].state, after[0].fenced) == (machines[0].id, GONE, True)
        assert after[0].reason == f"Slurm job {machines[0].id} ended: CANCELLED"
        assert not alive(running[0]["pid"]), "a fenced machine has no process left"
        assert [m.id for m in await slurm.poll()] == [machines[1].id], "a machine is reported gone once"
        await slurm.release(machines[0].id)
        await slurm.close()
        assert not cluster.jobs()
        assert not any(alive(found["pid"]) or Path(found["dir"]).exists() for found in running)

    run(story())


def test_typed_gpus_pend_with_slurms_reason_until_a_machine_is_free(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm = engine(cluster)
        first, second = await slurm.request(A100, agents(cluster, 2))
        machines = await until(slurm, lambda ms: states(ms) == [UP, PENDING] and ms[1].reason == "Resources")
        assert machines[0].node == "g1"
        assert describe_waiting("Slurm", "job", machines) == (
            f"1 machine requested from Slurm; job {second.id} is pending there (Resources)"
        )
        await slurm.release(first.id)
        machines = await until(slurm, lambda ms: states(ms) == [UP])
        assert (machines[0].id, machines[0].node) == (second.id, "g1")
        await slurm.close()

    run(story())


def test_a_pending_request_can_be_withdrawn(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm = engine(cluster, sbatch_options=("--hold",))
        (machine,) = await slurm.request(ANY, agents(cluster, 1))
        await until(slurm, lambda ms: ms[0].reason == "JobHeldUser")
        await slurm.release(machine.id)
        (gone,) = await until(slurm, lambda ms: states(ms) == [GONE])
        assert gone.fenced
        assert await slurm.poll() == []

    run(story())


def test_a_restarted_launcher_finds_its_own_machines_only(cluster: SlurmCluster) -> None:
    async def story() -> None:
        first, other = engine(cluster), engine(cluster, "abc12")
        await first.request(MachineRequest(2, "v100"), agents(cluster, 2))
        await other.request(MachineRequest(2), agents(cluster, 1))
        before = await until(first, lambda ms: states(ms) == [UP, UP])
        del first
        second = engine(cluster)
        after = await second.poll()
        assert after == before
        (third,) = await second.request(MachineRequest(1, "a100"), agents(cluster, 1), avoid={"slurm-3"})
        assert third.agent == "slurm-4"
        fresh = engine(cluster)
        (fourth,) = await fresh.request(MachineRequest(1), agents(cluster, 1))
        assert fourth.agent == "slurm-3", "names are not used twice, also if it never polled"
        await second.close()
        assert states(await until(other, lambda ms: states(ms) == [UP])) == [UP], (
            "another home's machine stays"
        )
        await other.close()

    run(story())


@pytest.mark.usefixtures("tracked_by_cgroup")
def test_scancel_by_somebody_else_is_seen_as_a_fenced_end(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm = engine(cluster)
        (machine,) = await slurm.request(ANY, agents(cluster, 1))
        await until(slurm, lambda ms: states(ms) == [UP])
        pid = seen(cluster, machine.id)["pid"]
        cluster.admin("scancel", machine.id)
        (gone,) = await until(slurm, lambda ms: states(ms) == [GONE])
        assert gone.fenced
        assert "CANCELLED" in gone.reason
        assert not alive(pid)

    run(story())


#: Leaves a process as a killed agent leaves a keeper: its parent has ended, and it is in a session of its own.
ORPHAN = """
(setsid bash -c 'trap "" TERM; echo $$ >$0.new; mv $0.new $0; exec sleep 1000' "$0" &)
exec sleep 1000
"""


def test_without_cgroups_an_end_is_no_fence_because_a_process_may_survive_it(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm, path = engine(cluster), cluster.out / "orphan"
        (machine,) = await slurm.request(ANY, [AgentCommand(("bash", "-c", ORPHAN, str(path)))])
        wait_for(path.exists, "the process runs")
        orphan = int(path.read_text())
        try:
            await until(slurm, lambda ms: states(ms) == [UP])
            cluster.admin("scancel", machine.id)
            (gone,) = await until(slurm, lambda ms: states(ms) == [GONE])
            assert alive(orphan), "the test shows nothing"
            assert "CANCELLED" in gone.reason
            assert not gone.fenced
        finally:
            os.kill(orphan, signal.SIGKILL)

    run(story())


def test_an_agent_that_fails_is_reported_with_its_exit_code_and_output(cluster: SlurmCluster) -> None:
    async def story() -> None:
        command = AgentCommand(("sh", "-c", "echo no torch here >&2; exit 7"))
        slurm = engine(cluster)
        await slurm.request(ANY, [command])
        (gone,) = await until(slurm, lambda ms: states(ms) == [GONE])
        said, _, log = gone.reason.partition("; its output is in ")
        assert said == f"Slurm job {gone.id} ended: FAILED, exit code 7: no torch here"
        assert Path(log).read_text() == "no torch here\n"

    run(story())


@pytest.mark.parametrize("ahead_s", [-DAY_S, DAY_S])
def test_a_time_limit_that_is_far_away_is_no_deadline_whatever_the_clocks_tell(
    cluster: SlurmCluster, clock_ahead: Callable[[int], None], ahead_s: int
) -> None:
    async def story() -> None:
        clock_ahead(ahead_s)
        slurm = engine(cluster, time_s=3600.0)
        await slurm.request(ANY, agents(cluster, 1))
        await until(slurm, lambda ms: states(ms) == [UP] or states(ms) == [LEAVING])
        assert states(await slurm.poll()) == [UP]
        assert slurm.clock_ahead_s == pytest.approx(ahead_s, abs=5)
        await slurm.close()

    run(story())


def test_the_time_limit_becomes_a_deadline_for_the_launcher_and_the_agent(
    cluster: SlurmCluster, clock_ahead: Callable[[int], None]
) -> None:
    async def story() -> None:
        clock_ahead(DAY_S)  # neither the server nor the node may go by its own clock
        slurm = engine(cluster, time_s=120.0)
        (machine,) = await slurm.request(ANY, agents(cluster, 1))
        (leaving,) = await until(slurm, lambda ms: states(ms) == [LEAVING])
        assert leaving.leaving_at_s is not None
        assert 60 < leaving.leaving_at_s - time.monotonic() <= 122
        found = seen(cluster, machine.id)
        wait_for(lambda: "leaving" in seen(cluster, machine.id), "Slurm warned the agent", 90)
        found = seen(cluster, machine.id)
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        assert float(found["leaving"]) - boot_s == pytest.approx(leaving.leaving_at_s, abs=3), (
            "both tell the same deadline"
        )
        assert alive(found["pid"]), "the warning does not end the agent"

        # The limit is extended: the machine stays, and its agent is started again if it is killed.
        cluster.admin("scontrol", "update", f"JobId={machine.id}", "TimeLimit=60")
        await until(slurm, lambda ms: states(ms) == [UP])
        os.kill(int(found["pid"]), signal.SIGKILL)
        wait_for(lambda: seen(cluster, machine.id)["pid"] != found["pid"], "the agent runs again")
        assert "leaving" not in seen(cluster, machine.id)
        await slurm.close()

    run(story())


@pytest.mark.usefixtures("tracked_by_cgroup")
def test_a_preemption_is_announced_and_the_machine_is_pending_again_and_comes_back(
    cluster: SlurmCluster,
) -> None:
    async def story() -> None:
        slurm, urgent = engine(cluster, partition="polite"), engine(cluster, "boss", partition="urgent")
        (machine,) = await slurm.request(A100, agents(cluster, 1))
        await until(slurm, lambda ms: states(ms) == [UP])
        pid = seen(cluster, machine.id)["pid"]
        await urgent.request(A100, agents(cluster, 1))
        (leaving,) = await until(slurm, lambda ms: states(ms) == [LEAVING])
        assert leaving.leaving_at_s is not None
        assert 2 < leaving.leaving_at_s - time.monotonic() <= 10, "while there is time to leave"
        # Slurm tells the agent only with PreemptParameters=send_user_signal. The launcher sees it in any case.
        while time.monotonic() < leaving.leaving_at_s - 2:
            assert alive(pid), "the agent has until the deadline"
            await asyncio.sleep(0.2)
        (waiting,) = await until(slurm, lambda ms: states(ms) == [PENDING])
        assert (waiting.id, waiting.node, waiting.fenced) == (machine.id, "", True)
        assert waiting.reason, "Slurm says why"
        await until(urgent, lambda ms: states(ms) == [UP])
        assert not alive(pid)
        await urgent.close()
        (back,) = await until(slurm, lambda ms: states(ms) == [UP])
        assert (back.id, back.node) == (machine.id, "g1")
        wait_for(lambda: seen(cluster, machine.id)["pid"] != pid, "the agent runs anew")
        await slurm.close()

    run(story())


@pytest.mark.usefixtures("tracked_by_cgroup")
def test_a_node_that_stops_responding_is_lost_without_a_fence(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm = engine(cluster, sbatch_options=("--nodelist=g2",))
        (machine,) = await slurm.request(MachineRequest(4, "v100"), agents(cluster, 1))
        await until(slurm, lambda ms: states(ms) == [UP])
        pid = seen(cluster, machine.id)["pid"]
        cluster.kill_node("g2")
        # By itself Slurm sees it after 25 s. It requeues the job, while the old agent still runs.
        cluster.admin("scontrol", "update", "NodeName=g2", "State=DOWN", "Reason=silent")
        (lost,) = await until(slurm, lambda ms: states(ms) != [UP])
        assert (lost.state, lost.fenced) == (PENDING, False)
        assert alive(pid), "Slurm cannot end processes on a node that does not respond"
        cluster.start_node("g2")
        await until(slurm, lambda ms: states(ms) == [UP])
        wait_for(lambda: not alive(pid), "slurmd ends the old agent when it returns")
        await slurm.close()

    run(story())


REFUSED = {
    "no such type": (MachineRequest(4, "h200"), {}, "Requested node configuration is not available"),
    "too many GPUs": (MachineRequest(9), {}, "Requested node configuration is not available"),
    "no such partition": (ANY, {"partition": "gold"}, "invalid partition specified"),
    "an option that does not exist": (ANY, {"sbatch_options": ("--gold=1",)}, "unrecognized option"),
    "an option that Shoal sets": (
        ANY,
        {"sbatch_options": ("--job-name=x",)},
        "Shoal sets the sbatch option --job-name",
    ),
    "no option at all": (ANY, {"sbatch_options": ("mem=1",)}, "does not begin with a hyphen"),
    "an unknown number of GPUs": (MachineRequest(None), {}, "set --gpus-per-node"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_slurm_refuses_is_refused_in_its_words(cluster: SlurmCluster, case: str) -> None:
    what, options, words = REFUSED[case]

    async def story() -> None:
        slurm = engine(cluster, **options)
        with pytest.raises(RequestRefused, match=words):
            await slurm.check(what)
        with pytest.raises(RequestRefused, match=words):
            await slurm.request(what, agents(cluster, 2))
        assert await slurm.poll() == []

    run(story())


def test_a_controller_that_is_down_is_unavailable_and_its_machines_are_kept(cluster: SlurmCluster) -> None:
    async def story() -> None:
        slurm = engine(cluster)
        await slurm.request(ANY, agents(cluster, 1))
        before = await until(slurm, lambda ms: states(ms) == [UP])
        cluster.kill_controller()
        try:
            slow = engine(cluster, command_timeout_s=2.0)
            with pytest.raises(EngineUnavailable, match=r"Slurm (does not answer|is not available)"):
                await slow.poll()
        finally:
            cluster.start_controller()
        wait_for(lambda: "UP" in cluster.admin("scontrol", "ping"), "slurmctld is back")
        assert await until(slurm, lambda ms: states(ms) == [UP]) == before
        await slurm.close()

    run(story())


def test_without_slurm_the_message_says_where_to_run_it(tmp_path: Path) -> None:
    async def story() -> None:
        slurm = SlurmEngine("abc1", environ={"PATH": str(tmp_path)})
        with pytest.raises(EngineUnavailable, match=r"squeue is not on the PATH.*on a login node"):
            await slurm.request(ANY, [AgentCommand(("true",))])

    run(story())
