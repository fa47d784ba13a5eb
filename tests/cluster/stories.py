"""What must hold on every engine, told with the real command line. Each function is a part of a story."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engines.shoal_home import SCRIPT, ShoalHome

MEET = Path(__file__).with_name("scripts") / "meet.py"


def submit_gang(home: ShoalHome, gpus: int, password: str) -> None:
    """A job of a fixed size that needs several machines. It has a secret in its environment."""
    options = ("--name", "gang", "--gpus", gpus, "--per-gpu", "--env", f"PASSWORD={password}")
    home.shoal("run", "-d", *options, "--", sys.executable, MEET)


def the_gang_spans_machines(home: ShoalHome, gpus: int) -> None:
    """It started on several machines at once. All ranks connected to rank 0, at the address of its machine."""
    home.until(lambda: home.job("gang").state == "succeeded", "the gang has run")
    lines = [line.text for line in home.client.logs("gang")]
    assert f"met {list(range(1, gpus))}" in lines, lines
    ranks = sorted(line for line in lines if line.startswith("rank "))
    hosts = [re.findall(r"^rank (\d+) .*at (\S+) master (\S+)", line)[0] for line in ranks]
    assert [rank for rank, _, _ in hosts] == [str(rank) for rank in range(gpus)], lines
    assert {master for _, _, master in hosts} == {hosts[0][1]}, "all meet on the machine of rank 0"
    node_of = {w.rank: w.node for w in home.job("gang").workers}
    address_of = {n.name: n.address for n in home.client.nodes()}
    assert len(set(node_of.values())) > 1, node_of
    assert [host for _, host, _ in hosts] == [address_of[node_of[rank]] for rank in range(gpus)]


def a_job_over_machines_ends_as_on_one(home: ShoalHome, gpus: int, steps: int = 40) -> None:
    """The same loss as in one process, and every line of every worker is in the log, in order."""
    home.train("over", str(gpus), steps=steps, step_s=0.0)
    home.until(lambda: home.job("over").state == "succeeded", "the job over machines has ended")
    lines = home.client.logs("over")
    places = _places(home, "over")
    assert len(set(places.values())) == len(places) == gpus, f"each process sees another GPU: {places}"
    assert len({node for node, _ in places.values()}) > 1, places
    for worker in places:
        mine = [line.text for line in lines if line.worker == worker and line.text.startswith("step ")]
        assert mine == [f"step {step}" for step in range(steps)], f"the log of {worker} is complete"
    command = [sys.executable, str(SCRIPT), str(steps), "0"]
    alone = subprocess.run(command, env=home.env, capture_output=True, text=True, check=True).stdout
    (loss,) = [line.text for line in lines if line.text.startswith("loss ")]
    assert float(loss.split()[1]) == pytest.approx(float(alone.split()[-1]), abs=1e-4)


def no_gpu_is_used_twice(home: ShoalHome, *jobs: str) -> None:
    """As the processes themselves see it: the engine granted GPUs to the agents, the agents gave them to workers."""
    granted = {}
    for name, agent in home.agents().items():
        environ = agent.environ()
        devices = environ["CUDA_VISIBLE_DEVICES"].split(",")
        granted[name] = [(environ["SHOAL_NODE"], device) for device in devices]
    used = []
    for job in jobs:
        processes = home.workers(job)
        assert processes.keys() == home.gpus_of(job).keys(), home.describe()
        places = _places_of_all(home, job, {*processes})
        used += [granted[node][gpu] for node, gpu in (places[worker] for worker in processes)]
    assert used
    assert len(used) == len(set(used)), used


def no_gpu_has_two_live_workers(home: ShoalHome, job: str) -> None:
    """At any moment, also while workers begin and end."""
    live = home.workers(job)
    places = [(w.node, w.gpu) for w in home.job(job).workers if w.id in live]
    assert len(places) == len(set(places)), (places, live)


def grows_back_after_their_end(
    home: ShoalHome, job: str, gpus: int, before: dict[str, int], lost: str
) -> None:
    """It had the workers `before`, and those on the node `lost` have no node any more.

    It gets workers on their GPUs when they are dead, not earlier.
    """
    node_of = {worker.id: worker.node for worker in home.job(job).workers}
    old = [pid for worker, pid in before.items() if node_of[worker] == lost]
    assert 0 < len(old) < len(before), node_of

    def has_grown() -> bool:
        no_gpu_has_two_live_workers(home, job)
        new = home.workers(job).keys() - before.keys()
        assert not (new and alive(old)), f"{new} beside {old}\n{home.describe()}"
        return home.job(job).gpus == gpus

    home.until(has_grown, f"{job} has {gpus} GPUs again")
    assert not alive(old)


def _places_of_all(home: ShoalHome, job: str, workers: set[str]) -> dict[str, tuple[str, int]]:
    """Their logs may be on the way."""
    home.until(lambda: workers <= _places(home, job).keys(), f"the log has the GPU of each worker of {job}")
    return _places(home, job)


def _places(home: ShoalHome, job: str) -> dict[str, tuple[str, int]]:
    """Node and GPU of each worker, the GPU as the worker's environment has it."""
    node_of = {worker.id: worker.node for worker in home.job(job).workers}
    said = {line.worker: line.text for line in home.client.logs(job) if line.text.startswith("on GPU ")}
    return {worker: (node_of[worker], int(text.split()[-1])) for worker, text in said.items()}


def a_killed_agent_is_replaced(home: ShoalHome, job: str) -> str:
    """`kill -9` of an agent: the engine starts it again, and it finds its workers. The result is its name."""
    before = home.workers(job)
    name, agent = next(iter(home.agents().items()))
    agent.kill()
    agent.wait(10)
    home.until(lambda: home.agents().get(name) not in (None, agent), f"the agent {name} is started again")
    home.until(lambda: name in [n.name for n in home.nodes()], f"{name} is ready again")
    home.trains_on(job)
    assert home.workers(job) == before, "no worker was lost"
    return name


@contextmanager
def logs_survive(home: ShoalHome, job: str, node: str) -> Iterator[None]:
    """A node crashes in the body: what its workers had printed until then can still be read."""
    there = [worker for worker, (at, _) in home.gpus_of(job).items() if at == node]
    assert there
    home.trains_on(job)
    before = {worker: _steps(home, job, worker) for worker in there}
    yield
    for worker, steps in before.items():
        found = _steps(home, job, worker)
        assert steps
        assert found[: len(steps)] == steps
        assert set(found) == set(range(found[0], found[-1] + 1)), f"no line of {worker} is missing"


def _steps(home: ShoalHome, job: str, worker: str) -> list[int]:
    texts = [line.text for line in home.client.logs(job) if line.worker == worker]
    return [int(text.split()[1]) for text in texts if text.startswith("step ")]


def pause(home: ShoalHome, job: str) -> int:
    """The step that the job was paused at. No process of it is left."""
    home.shoal("pause", job)
    home.until(lambda: home.job(job).state == "paused" and not home.workers(job), f"{job} is paused")
    return home.job(job).step or 0


def resume(home: ShoalHome, job: str, step: int) -> None:
    """It goes on at the step after the one it was paused at."""
    with state_is_kept(home, job):
        home.shoal("resume", job)
        home.until(lambda: (home.job(job).step or 0) > step, f"{job} goes on from where it was")


@contextmanager
def state_is_kept(home: ShoalHome, job: str) -> Iterator[None]:
    """In the body all workers of the job are replaced by others. They go on at the step after the last one."""
    old = {line.worker for line in home.client.logs(job)}
    yield
    assert home.job(job).restarts == 0, [event.message for event in home.client.events(job=job)]
    workers = {line.worker for line in home.client.logs(job)}
    done = {worker: steps[-1] for worker in old if (steps := _steps(home, job, worker))}
    firsts = {worker: steps[0] for worker in workers - old if (steps := _steps(home, job, worker))}
    assert firsts
    assert min(firsts.values()) == max(done.values()) + 1, f"repeated or left out: {done}, {firsts}"


def nothing_is_left(home: ShoalHome) -> None:
    home.until(lambda: not home.left(), "no process of this home is left", limit_s=20.0)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
