"""Nodes join, are lost, leave, and come back in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.executors.base import Exit, NodeInfo, NodeLeaving, NodeLost, NodeUnreachable
from shoal.server.loop import node_watch
from shoal.server.loop.node_table import NodeTable

from .fakes import Fleet, Here, run, server


def node(name: str, gpus: int = 2, gpu_type: str = "virtual") -> NodeInfo:
    return NodeInfo(name, gpus, gpu_type, True, remote=True)


def nodes_of(here: Here, job: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for worker in here.loop.jobs[job].workers.values():
        found[worker.node] = found.get(worker.node, 0) + 1
    return found


def lose(here: Here, name: str) -> None:
    """The machine is gone: its workers are reported first, as executors promise."""
    for worker, spec in list(here.fleet.running.items()):
        if spec.node == name:
            del here.fleet.running[worker]
            if worker in here.fleet.live:
                here.fleet.live.pop(worker).end()
            here.fleet.exits[worker] = Exit(worker, None, None, "node lost", node_lost=True)
            here.fleet.on_exit(here.fleet.exits[worker])
    here.fleet.on_node(NodeLost(name, "its machine is gone"))


def test_a_live_job_grows_onto_a_node_that_joins_and_goes_on_when_it_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, (node("a"),), policy="max-min") as here:
            job = (await here.submit("1..4", resize="live"))["id"]
            await here.until(lambda: here.gpus(job) == 2, train=(job,))
            here.fleet.join(node("b"))
            await here.until(lambda: nodes_of(here, job) == {"a": 2, "b": 2}, train=(job,))
            row = here.control.store.job(job)
            assert row is not None
            assert row["target"] == [["a", 2], ["b", 2]]
            shown = (await here.get("/status"))["total_gpus"]
            assert shown == 4
            lose(here, "b")
            await here.until(lambda: nodes_of(here, job) == {"a": 2}, train=(job,))
            states = {n["name"]: n["state"] for n in (await here.get("/nodes"))["items"]}
            assert states == {"a": "ready", "b": "lost"}
            assert (await here.get("/status"))["total_gpus"] == 2
            here.check()

    run(story())


def test_a_node_of_another_type_joins_and_the_accounts_of_users_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, (node("a"),), policy="fair-afs") as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.join(node("b", 4, "fast"))
            other = (await here.submit("4", gpu_types=["fast"]))["id"]
            await here.until(lambda: here.state(other) == "running")
            assert nodes_of(here, other) == {"b": 4}
            shares = (await here.get("/shares"))["items"]
            assert sum(share["gpus"] for share in shares) == 6
            assert here.loop.live_ledger.ledger.gpu_types == ("virtual", "fast")
            assert here.loop.policy_name == "fair-afs", "the policy did not fail"
            here.check()

    run(story())


def test_nodes_come_back_in_another_order_and_every_job_keeps_its_place(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet((node("a"), node("b")))
        async with server(tmp_path, fleet=fleet, policy="max-min", kill=True) as here:
            first = (await here.submit("2"))["id"]
            second = (await here.submit("1..2", resize="live"))["id"]
            await here.until(lambda: here.gpus(first) == 2 and here.gpus(second) == 2, train=(second,))
            before = (nodes_of(here, first), nodes_of(here, second))
            started = list(fleet.started)
        fleet._nodes, fleet.awaited = (), (node("b"), node("a"))
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            assert here.loop.table.names == ["a", "b"]
            fleet.join(node("b"))
            fleet.join(node("a"))
            await here.until(lambda: here.gpus(second) == 2, train=(second,))
            assert (nodes_of(here, first), nodes_of(here, second)) == before
            assert fleet.started == started, "nobody was moved"
            here.check()

    run(story())


def test_an_unreachable_node_is_given_up_after_a_while_and_its_gpus_only_with_the_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "GIVE_UP_S", 0.05)

    async def story() -> None:
        async with server(tmp_path, (node("a"), node("b")), policy="fifo") as here:
            job = (await here.submit("2", resize="restart"))["id"]
            await here.until(lambda: here.state(job) == "running")
            ((at, _),) = nodes_of(here, job).items()
            here.fleet.stubborn = True  # nothing that it is told arrives
            here.fleet.on_node(NodeUnreachable(at, "connection closed"))
            other = "b" if at == "a" else "a"
            await here.until(lambda: here.loop.jobs[job].target == {here.loop.table.find(other): 2})
            assert nodes_of(here, job) == {at: 2}, "the old processes may be alive"
            lose(here, at)
            await here.until(lambda: nodes_of(here, job) == {other: 2})
            assert (await here.get(f"/jobs/{job}"))["restarts"] == 0, "it is no failure of the command"
            here.check()

    run(story())


def test_a_leaving_node_is_empty_before_it_goes_but_a_job_that_cannot_move_runs_to_the_end(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, (node("a"), node("b", 3)), policy="fifo") as here:
            stays = (await here.submit("2"))["id"]
            await here.until(lambda: nodes_of(here, stays) == {"a": 2})
            moves = (await here.submit("1", resize="restart"))["id"]
            await here.until(lambda: nodes_of(here, moves) == {"b": 1})
            here.fleet.on_node(NodeLeaving("a", 60.0, "its time limit"))
            here.fleet.on_node(NodeLeaving("b", 60.0, "its time limit"))
            await here.until(lambda: here.state(moves) == "pending")
            assert nodes_of(here, moves) == {}
            assert here.state(stays) == "running"
            assert not here.fleet.suspended
            found = {n["name"]: (n["state"], n["why"]) for n in (await here.get("/nodes"))["items"]}
            assert found == dict.fromkeys(("a", "b"), ("leaving", "its time limit"))
            reason = (await here.get(f"/jobs/{moves}"))["reason"]
            assert "no node is ready: a (leaving: its time limit)" in reason["sentence"]
            lose(here, "b")
            here.fleet.join(node("b", 3))
            await here.until(lambda: nodes_of(here, moves) == {"b": 1})
            here.check()

    run(story())


def test_a_command_that_cannot_move_is_warned_once_before_its_machine_goes(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, (node("a", 4),), policy="fifo") as here:
            # The numbers leave room for a slow machine: `late` is not warned within any test, `early` is at once.
            early = (await here.submit("1", warn_signal="USR1", warn_s=3000.0))["id"]
            late = (await here.submit("1", warn_signal="USR1", warn_s=0.0))["id"]
            silent = (await here.submit("1", warn_s=3000.0))["id"]
            await here.until(lambda: all(here.state(job) == "running" for job in (early, late, silent)))
            here.loop.endings.look()
            assert here.fleet.warned == []
            leaves = NodeLeaving("a", 2000.0, "its time limit")

            def looked(change: NodeLeaving) -> None:
                here.fleet.on_node(change)
                here.loop.endings.look()
                here.loop.endings.look()

            looked(leaves)
            await here.until(lambda: here.fleet.warned == [(f"{early}.0", "USR1")])
            events = (await here.get("/events?type=job.warned"))["items"]
            words = "node a is taken away in 2000 s (its time limit) and the command cannot move"
            found = {event["job"]: event["message"] for event in events}
            assert found == {early: f"{words}; it got SIGUSR1", silent: words}
            looked(NodeLeaving("a", None, ""))
            looked(leaves)  # the machine stayed, and leaves after all
            await here.until(lambda: here.fleet.warned == [(f"{early}.0", "USR1")] * 2)
            assert here.state(early) == "running"

    run(story())


def test_without_any_node_jobs_wait_and_start_when_one_joins(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, (), policy="max-min") as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: job in here.loop.scheduler.jobs)
            reason = (await here.get(f"/jobs/{job}"))["reason"]
            assert "no node has joined" in reason["sentence"]
            assert (await here.get("/nodes"))["items"] == []
            assert (await here.get("/doctor"))["checks"]
            here.fleet.join(node("a", 4))
            await here.until(lambda: here.state(job) == "running")
            here.check()

    run(story())


def test_targets_of_earlier_versions_go_by_index() -> None:
    table = NodeTable([], [node("a"), node("b")], [], [])
    assert table.indexed([[1, 2]]) == table.indexed([["b", 2]]) == {1: 2}
    assert table.indexed([["gone", 2]]) == {}
    assert table.named({1: 2, 0: 1}) == [["a", 1], ["b", 2]]


def lease_ends(here: Here, job: int) -> None:
    """The agent itself reports that the keeper of each worker has killed it, as the lease of its node had ended."""
    for worker in list(here.loop.jobs[job].workers):
        del here.fleet.running[worker]
        why = "the lease of its node ended: the agent could not reach the control plane"
        here.fleet.exits[worker] = Exit(worker, None, "SIGKILL", why, node_lost=True)
        here.fleet.on_exit(here.fleet.exits[worker])


def test_a_job_that_restarts_begins_again_when_the_lease_of_its_node_has_ended(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, (node("a"),)) as here:
            job = (await here.submit("2", resize="restart"))["id"]
            await here.until(lambda: here.state(job) == "running")
            before = set(here.loop.jobs[job].workers)
            lease_ends(here, job)
            await here.until(lambda: here.state(job) == "running" and before.isdisjoint(here.fleet.running))
            assert not (await here.get(f"/jobs/{job}"))["restarts"], "the command has not failed"

    run(story())


def test_a_job_that_cannot_restart_says_that_the_lease_ended_and_not_that_its_command_was_killed(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, (node("a"),)) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            lease_ends(here, job)
            await here.until(lambda: here.state(job) == "failed")
            message = (await here.get(f"/jobs/{job}"))["message"]
            assert "lease of its node ended" in message
            assert "SIGKILL" not in message

    run(story())
