"""A GPU has one owner: machines that are silent, machines that return, and gangs that are suspended.

The cluster has two machines of 2 GPUs, and may have no more.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from engines.shoal_home import ShoalHome
from shoal.server.api.models import JobSpec

from .stories import alive

SHORT_LEASE_S = 20


def a_killed_server_is_replaced(home: ShoalHome, job: str) -> None:
    """`kill -9` of the server: training goes on, and the next server takes over the same processes on the same GPUs.

    The machines return in another order than they joined: an agent is stopped until the next one has connected. What
    follows has to outlive no restart of a server, so it gets by with a shorter lease.
    """
    before, places = home.workers(job), home.gpus_of(job)
    assert len({node for node, _ in places.values()}) == 2, places
    step = home.job(job).step or 0
    agents = home.agents()
    first, second = [agents[n.name] for n in home.nodes()]
    home.kill_server()
    first.suspend()
    with ThreadPoolExecutor() as pool:
        up = pool.submit(home.up, "--lease", f"{SHORT_LEASE_S}s")
        try:
            home.until(lambda: up.done() or _is_connected(home, second), "the other agent is back")
        finally:
            first.resume()
        up.result()
    home.until(lambda: (home.job(job).step or 0) > step, f"{job} went on")
    assert home.workers(job) == before, f"the same processes\n{home.describe()}"
    assert home.gpus_of(job) == places


def a_suspended_gang_wakes_only_on_its_own_machine(home: ShoalHome) -> None:
    """It is suspended and another job has its GPUs. Those of the other machine are free, and of no use to it.

    Afterwards, `one` and `after` run, each on one machine.
    """
    place, (pid,) = _hold(home, "one")
    other, _ = _hold(home, "two")
    assert other != place
    home.client.pause("one")
    home.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the gang is suspended")
    assert _hold(home, "guest")[0] == place
    home.client.cancel("two")
    home.until(lambda: home.job("two").state == "cancelled", "the other machine is free")
    home.client.resume("one")
    assert _hold(home, "after")[0] == other, "decided later, and it gets the other machine"
    assert home.job("one").state == "pending"
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    home.client.cancel("guest")
    home.until(lambda: home.job("one").state == "running", "the gang goes on")
    home.until(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED, "in the same process")
    assert [*home.workers("one").values()] == [pid]
    assert _machine_of(home, "one") == place


def the_gpus_of_a_silent_machine_wait_for_its_lease(home: ShoalHome, meanwhile: Callable[[], None]) -> None:
    """The agent of `one` is stopped, while a job waits for GPUs. It gets none before the worker of `one` is dead."""
    place, undisturbed = _machine_of(home, "one"), home.workers("after")
    (pid,) = home.workers("one").values()
    agent = home.agents()[place]
    _submit(home, "next")

    def has_one_owner() -> bool:
        others = home.workers("next"), home.gpus_of("next")
        assert not (any(others) and alive([pid])), f"{others} beside {pid}\n{home.describe()}"
        return True

    def is_silent() -> bool:
        return has_one_owner() and place in [n.name for n in home.nodes("unreachable")]

    agent.suspend()
    try:
        home.until(is_silent, f"{place} is silent")
        assert alive([pid]), "its lease has not ended"
        meanwhile()
        home.until(lambda: has_one_owner() and not alive([pid]), "the keeper ends the worker with its lease")
    finally:
        if alive([agent.pid]):
            agent.resume()
    home.until(lambda: home.job("next").state == "running" and home.workers("next"), "the next owner")
    assert not alive([pid])
    assert _machine_of(home, "next") != _machine_of(home, "after")
    assert home.workers("after") == undisturbed, "the other machine is not disturbed"
    for name in ("after", "next"):
        home.client.cancel(name)


def _is_connected(home: ShoalHome, agent: psutil.Process) -> bool:
    to = [c.raddr.port for c in agent.net_connections() if c.raddr and c.status == psutil.CONN_ESTABLISHED]
    return home.agents_port in to


def _submit(home: ShoalHome, name: str) -> None:
    home.client.submit(JobSpec(name=name, gpus="2", command=["sleep", "1000"]))


def _hold(home: ShoalHome, name: str) -> tuple[str, list[int]]:
    """A job takes both GPUs of a machine. The name of the machine, and its processes."""
    _submit(home, name)
    home.until(lambda: home.job(name).state == "running" and home.workers(name), f"{name} runs")
    return _machine_of(home, name), [*home.workers(name).values()]


def _machine_of(home: ShoalHome, name: str) -> str:
    (place,) = {node for node, _ in home.gpus_of(name).values()}
    return place
