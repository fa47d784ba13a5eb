"""What must hold on every engine, told with the real command line. Each function is a part of a story."""

from __future__ import annotations

import sys

import psutil

from engines.shoal_home import ShoalHome

GANG = (
    "import os; e = os.environ; "
    "print('rank', e['RANK'], 'of', e['WORLD_SIZE'], 'at', e['SHOAL_HOST'], 'meets at', e['MASTER_ADDR'], flush=True)"
)


def submit_gang(home: ShoalHome, gpus: int) -> None:
    """A job of a fixed size that needs several machines."""
    home.shoal("run", "-d", "--name", "gang", "--gpus", gpus, "--per-gpu", "--", sys.executable, "-c", GANG)


def the_gang_spans_machines(home: ShoalHome, gpus: int) -> None:
    """It started on several machines at once. All ranks met on the machine of rank 0."""
    home.until(lambda: home.job("gang").state == "succeeded", "the gang has run")
    lines = sorted(line.text for line in home.client.logs("gang"))
    words = [line.split() for line in lines]
    assert [w[1] for w in words] == [str(rank) for rank in range(gpus)], lines
    assert {w[3] for w in words} == {str(gpus)}
    assert {w[-1] for w in words} == {words[0][5]}, "rank 0's address"


def no_gpu_is_used_twice(home: ShoalHome, *jobs: str) -> None:
    used = [place for job in jobs for place in home.gpus_of(job).values()]
    assert len(used) == len(set(used)), used


def a_killed_server_is_replaced(home: ShoalHome, job: str) -> None:
    """`kill -9` of the server: training goes on, and the next server takes over the same processes."""
    before = home.workers(job)
    assert before
    step = home.job(job).step or 0
    home.kill_server()
    home.up()
    home.until(lambda: (home.job(job).step or 0) > step, f"{job} went on")
    assert home.workers(job) == before, f"the same processes\n{home.describe()}"


def a_killed_agent_is_replaced(home: ShoalHome, job: str) -> None:
    """`kill -9` of an agent: the engine starts it again, and it finds its workers."""
    before = home.workers(job)
    name, agent = next(iter(home.agents().items()))
    agent.kill()
    agent.wait(10)
    home.until(lambda: home.agents().get(name) not in (None, agent), f"the agent {name} is started again")
    home.until(lambda: name in [n.name for n in home.nodes()], f"{name} is ready again")
    home.trains_on(job)
    assert home.workers(job) == before, "no worker was lost"


def nothing_is_left(home: ShoalHome) -> None:
    home.until(lambda: not home.left(), "no process of this home is left")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
