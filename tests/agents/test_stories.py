"""Single stories of the agents' protocol: each shows one rule."""

from __future__ import annotations

import pytest

from shoal import __version__
from shoal.agents import fleet_records as fr
from shoal.agents import fleet_state as fl
from shoal.agents.fleet_records import Link
from shoal.executors import base
from shoal.executors.base import NodeUp
from shoal.wire import agent_messages as am

from .agent_world import TIMING, Clock, Machine, World


def world(*clocks: Clock) -> World:
    agent, fleet = clocks or (Clock(), Clock())
    made = World([Machine("a", "first", agent), Machine("a", "impostor", agent, gpus=4)], fleet)
    made.connect(made.machines[0])
    made.exchange()
    made.start("w", "a")
    made.exchange()
    return made


@pytest.mark.parametrize("agent_rate", [0.9995, 1.0005])
@pytest.mark.parametrize("offset_s", [-86400.0, 0.0, 86400.0])
def test_a_silent_nodes_worker_is_reported_only_after_its_keeper_has_killed_it(
    agent_rate: float, offset_s: float
) -> None:
    story = world(Clock(offset_s, agent_rate), Clock(7.0, 2.0 - agent_rate))
    process = story.machines[0].disk["w"]
    died_s = reported_s = None
    while reported_s is None:
        story.advance(0.5)
        story.tick()
        died_s = story.now_s if died_s is None and not process.alive else died_s
        reported_s = story.now_s if "w" in story.exits else None
    assert died_s is not None
    assert died_s <= reported_s
    assert story.link("a") is Link.LOST


def test_a_delayed_answer_does_not_extend_the_lease_beyond_what_the_control_plane_assumes() -> None:
    story = world()
    machine = story.machines[0]
    connection = machine.connection
    assert connection is not None
    story.renew(machine)
    begin_s = story.now_s
    story.deliver_to_fleet(machine, connection)
    story.advance(20.0)  # the answer is on its way for so long
    story.deliver_to_agent(machine, connection)
    assert machine.lease_until_s == begin_s + TIMING.lease_s


def test_a_worker_that_a_keeper_ended_with_the_lease_is_lost_with_its_node_also_when_its_agent_reports_it() -> (
    None
):
    story = world()
    story.advance(TIMING.lease_s + 1.0)  # in the margin for keepers: the node is not lost yet
    machine = story.machines[0]
    ended = am.Exited("w", signal="SIGKILL", why="the lease of its node ended", node_lost=True)
    story.end(machine, "w", ended)
    story.exchange()
    assert story.link("a") is not Link.LOST
    assert story.exits["w"].node_lost


def test_a_start_that_arrives_after_the_lease_starts_nothing() -> None:
    story = world()
    machine = story.machines[0]
    connection = machine.connection
    assert connection is not None
    story.start("late", "a")
    story.advance(TIMING.lease_s + 1.0)  # the agent is suspended, and the command waits in its socket
    story.deliver_to_agent(machine, connection)
    assert "late" not in story.starts
    story.exchange()
    assert not story.exits["late"].began
    assert "lease" in story.exits["late"].why


def test_a_restarted_control_plane_waits_for_leases_that_it_granted_before() -> None:
    story = world()
    story.boot_fleet()
    story.advance(1.0)
    story.tick()
    assert "w" not in story.exits
    for _ in range(80):
        story.advance(0.5)
        story.tick()
    assert "w" in story.exits


def test_commands_survive_a_broken_connection_and_are_done_once() -> None:
    story = world()
    machine = story.machines[0]
    assert machine.connection is not None
    story.start("second", "a")
    story.cut(machine.connection)
    story.fleet_notices(machine.connection)
    story.start("third", "a")
    story.agent_notices(machine)
    story.connect(machine)
    story.exchange()
    assert story.starts == {"w": 1, "second": 1, "third": 1}
    assert not story.fleet.agents["a"].outbox


def test_a_start_whose_acknowledgement_was_lost_is_not_repeated_to_a_restarted_agent() -> None:
    story = world()
    machine = story.machines[0]
    connection = machine.connection
    assert connection is not None
    story.start("second", "a")
    story.deliver_to_agent(machine, connection)
    story.cut(connection)
    story.kill_agent(machine)
    story.fleet_notices(connection)
    story.connect(machine)
    story.exchange()
    assert story.starts["second"] == 1
    assert not any(isinstance(o, am.Start) for o in story.fleet.agents["a"].outbox.values())


def test_an_unwanted_worker_is_killed_and_forgotten() -> None:
    story = world()
    machine = story.machines[0]
    del story.stored["w"]  # as after a restart from an older copy of the store
    story.boot_fleet()
    story.agent_notices(machine)
    story.connect(machine)
    story.exchange()
    assert not machine.disk
    assert not story.fleet.agents["a"].unknown


def test_a_node_is_not_up_while_a_worker_runs_there_that_nobody_knows() -> None:
    """Its GPU would be given to another one."""
    story = world()
    machine = story.machines[0]
    del story.stored["w"]
    story.boot_fleet()
    story.agent_notices(machine)
    story.connect(machine)
    connection = machine.connection
    assert connection is not None
    story.events.clear()
    hello = connection.to_fleet.popleft()
    assert isinstance(hello, am.AgentHello)
    effects = story.fleet.hello(hello, machine.instance, story.fleet_now(), 0.0)
    assert fr.EndsUnknown("a", ("w",)) in effects
    story.obey_fleet(effects, connection)
    while connection.to_agent:
        story.deliver_to_agent(machine, connection)
    assert not machine.disk["w"].alive
    assert not any(isinstance(event, NodeUp) for event in story.events)
    story.exchange()
    assert any(isinstance(event, NodeUp) for event in story.events)


def test_a_second_agent_is_refused_while_the_first_is_connected_and_while_its_workers_may_live() -> None:
    story = world()
    first, second = story.machines
    story.connect(second)
    story.exchange()
    assert story.refusals == ["another agent named a is connected: give this one another --name"]
    assert first.connection is not None
    story.cut(first.connection)
    story.fleet_notices(first.connection)
    story.connect(second)
    story.exchange()
    assert "may be alive for" in story.refusals[-1]
    for _ in range(80):
        story.advance(0.5)
        story.tick()
    story.connect(second)
    story.exchange()
    assert story.link("a") is Link.CONNECTED
    assert [e.node.gpus for e in story.events if isinstance(e, base.NodeUp)] == [2, 4]


def test_a_second_agent_is_refused_for_good_once_the_first_has_spoken_since() -> None:
    story = world()
    first, second = story.machines

    def refused_for_good() -> bool:
        story.connect(second)
        assert second.connection is not None
        hello = second.connection.to_fleet.popleft()
        assert isinstance(hello, am.AgentHello)
        (refusal,) = story.fleet.hello(hello, second.instance, story.fleet_now(), 0.0)
        assert isinstance(refusal, fr.Refuse)
        assert "another agent named a is connected" in refusal.why
        story.agent_notices(second)
        return refusal.final

    assert not refused_for_good(), "the first may have crashed, and be this one before"
    story.advance(TIMING.heartbeat_s)
    story.fleet.excuse(TIMING.heartbeat_s)
    assert not refused_for_good(), "nothing was heard of the first"
    story.advance(TIMING.heartbeat_s)
    story.renew(first)
    story.exchange()
    assert refused_for_good()


def test_the_end_is_reported_after_the_whole_output() -> None:
    story = world()
    machine = story.machines[0]
    connection = machine.connection
    assert connection is not None
    machine.disk["w"].output += b"a line\n"
    story.end(machine, "w", am.Exited("w", code=0))
    story.deliver_to_fleet(machine, connection)
    assert "w" not in story.exits
    story.ship_logs(machine)
    story.exchange()
    assert story.exits["w"].code == 0
    assert bytes(story.copies["w"]) == b"a line\n"


def test_an_end_that_was_seen_is_reported_when_the_connection_breaks_before_the_output() -> None:
    story = world()
    machine = story.machines[0]
    connection = machine.connection
    assert connection is not None
    machine.disk["w"].output += b"a line\n"
    story.end(machine, "w", am.Exited("w", code=0))
    story.deliver_to_fleet(machine, connection)
    story.cut(connection)
    story.fleet_notices(connection)
    assert story.exits["w"].code == 0
    story.agent_notices(machine)
    story.connect(machine)
    while connection is not None and (machine.disk or not story.copies["w"]):
        story.exchange()
        story.ship_logs(machine)
    assert bytes(story.copies["w"]) == b"a line\n"


def test_a_node_that_announced_its_end_and_has_no_workers_is_lost_at_once() -> None:
    story = world()
    machine = story.machines[0]
    story.end(machine, "w", am.Exited("w", code=0))
    story.obey_agent(machine, machine.state.leaving(60.0, "time limit", machine.clock.read(story.now_s)))
    story.exchange()
    assert any(isinstance(e, base.NodeLeaving) and e.why == "time limit" for e in story.events)
    assert machine.connection is not None
    story.fleet_notices(machine.connection)
    assert story.link("a") is Link.LOST


def test_an_agent_of_another_version_is_refused_for_good() -> None:
    fleet = fl.FleetState("epoch")
    hello = am.AgentHello("a", "run", (), 0.0, 0.0, protocol=99)
    (refusal,) = fleet.hello(hello, "first", 0.0, 0.0)
    assert isinstance(refusal, fr.Refuse)
    assert refusal.final
    assert "protocol 99" in refusal.why
    assert f"install version {__version__} of Shoal" in refusal.why


def test_a_restarted_agent_reports_an_end_that_nobody_heard_of_and_its_whole_output() -> None:
    story = world()
    machine = story.machines[0]
    connection = machine.connection
    assert connection is not None
    machine.disk["w"].output += b"one\n"
    story.ship_logs(machine)
    story.exchange()
    story.cut(connection)
    machine.disk["w"].output += b"two\n"
    story.end(machine, "w", am.Exited("w", code=3))
    story.kill_agent(machine)
    story.fleet_notices(connection)
    assert "w" not in story.exits
    story.connect(machine)
    while machine.disk:
        story.exchange()
        story.ship_logs(machine)
    assert story.exits["w"].code == 3
    assert bytes(story.copies["w"]) == b"one\ntwo\n"
