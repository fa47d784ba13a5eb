"""The order of log lines and all durations are independent of the nodes' clocks."""

from __future__ import annotations

from pathlib import Path

from shoal.agents.fleet_state import AppendLog, FleetState
from shoal.executors.logs import read_lines, with_our_clock
from shoal.wire import agent_messages as am

LINE = b"2026-05-02T00:00:01.500000Z step 1\n"


def fleet_with(wall_s: float) -> FleetState:
    fleet = FleetState("epoch")
    node = am.NodeFacts("a", 1, "virtual", True)
    fleet.hello(am.AgentHello("a", "run", (node,), 0.0, wall_s), "instance", 0.0, 1000.0)
    fleet.start(am.Start("1.0", "a", 0, ("true",), "/", {}))
    return fleet


def test_lines_of_a_node_whose_clock_is_a_day_off_get_the_control_planes_time(tmp_path: Path) -> None:
    fleet = fleet_with(1000.0 + 86400.0)
    effects = fleet.received("a", am.LogChunk("1.0", 0, 0, LINE), 1.0, 1001.0)
    (append,) = [e for e in effects if isinstance(e, AppendLog)]
    assert append.clock_ahead_s == 86400.0
    (tmp_path / "log.0").write_bytes(with_our_clock(append.data, append.clock_ahead_s))
    (line,) = read_lines(tmp_path, 0)
    assert (line.text, line.end) == ("step 1", len(LINE)), "positions stay valid"
    assert (tmp_path / "log.0").read_bytes().startswith(b"2026-05-01T00:00:01.500000Z")


def test_a_clock_that_is_set_while_connected_is_followed_with_the_next_heartbeat() -> None:
    fleet = fleet_with(1000.0)
    fleet.received("a", am.Renew(5.0, 1005.0 - 3600.0), 5.0, 1005.0)
    (append, *_) = fleet.received("a", am.LogChunk("1.0", 0, 0, LINE), 6.0, 1006.0)
    assert isinstance(append, AppendLog)
    assert append.clock_ahead_s == -3600.0


def test_lines_without_a_time_and_clocks_that_agree_are_left_as_they_are() -> None:
    assert with_our_clock(b"no time\n", 5.0) == b"no time\n"
    assert with_our_clock(LINE, 0.001) is LINE
    # A year that cannot be written stays, too.
    assert with_our_clock(b"0001-01-01T00:00:00.000000Z x\n", 10.0) == b"0001-01-01T00:00:00.000000Z x\n"
