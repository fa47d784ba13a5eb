"""The order of log lines and all durations are independent of the nodes' clocks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shoal.agents.fleet_records import AppendLog
from shoal.agents.fleet_state import FleetState
from shoal.executors import keeper
from shoal.executors.keeper_files import stamps_ahead_s
from shoal.executors.logs import read_lines, with_our_clock
from shoal.wire import agent_messages as am

LINE = b"2026-05-02T00:00:01.500000Z step 1\n"
DAY_S = 86400.0
BOOTED_S = 900.0
"""Our time when the node booted: its lease clock shows `now - BOOTED_S`."""


def fleet_with(wall_s: float) -> FleetState:
    """A fleet at 1000 s of our clock, with an agent whose wall clock shows `wall_s`."""
    fleet = FleetState("epoch")
    node = am.NodeFacts("a", 1, "virtual", True)
    hello = am.AgentHello("a", "run", (node,), 1000.0 - BOOTED_S, wall_s)
    fleet.hello(hello, "instance", 0.0, 1000.0)
    fleet.start(am.Start("1.0", "a", 0, ("true",), "/", {}))
    return fleet


def shipped(fleet: FleetState, begin: int, stamps_ahead_s: float) -> AppendLog:
    effects = fleet.received("a", am.LogChunk("1.0", begin, begin, LINE, stamps_ahead_s), 1.0, 1001.0)
    (append,) = [e for e in effects if isinstance(e, AppendLog)]
    return append


def test_lines_of_a_node_whose_clock_is_a_day_off_get_the_control_planes_time(tmp_path: Path) -> None:
    append = shipped(fleet_with(1000.0 + DAY_S), 0, BOOTED_S + DAY_S)
    assert append.clock_ahead_s == DAY_S
    (tmp_path / "log.0").write_bytes(with_our_clock(append.data, append.clock_ahead_s))
    (line,) = read_lines(tmp_path, 0)
    assert (line.text, line.end) == ("step 1", len(LINE)), "positions stay valid"
    assert (tmp_path / "log.0").read_bytes().startswith(b"2026-05-01T00:00:01.500000Z")


def test_a_clock_that_is_repaired_changes_nothing_for_keepers_that_run() -> None:
    """The keeper stamps with the clock that it read at its start. What the machine's clock shows later is no matter."""
    fleet = fleet_with(1000.0 + DAY_S)
    before = shipped(fleet, 0, BOOTED_S + DAY_S)
    fleet.received("a", am.Renew(1005.0 - BOOTED_S, 1005.0), 5.0, 1005.0)  # it is right now
    after = shipped(fleet, len(LINE), BOOTED_S + DAY_S)
    assert before.clock_ahead_s == after.clock_ahead_s == DAY_S
    assert shipped(fleet, 2 * len(LINE), BOOTED_S).clock_ahead_s == 0.0, "of a keeper that started afterwards"
    assert fleet.agents["a"].wall_offset_s == 0.0, "and `doctor` shows the clock as it is"


def test_an_agent_knows_the_clock_of_each_keeper_by_what_the_keeper_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day_off = {"wall_offset_s": BOOTED_S + DAY_S, "boot": keeper.boot_id()}
    started = {"pid": 1, "start_time": 1, "keeper_pid": 1, "keeper_start_time": 1}
    (tmp_path / "started").write_text(json.dumps(started | day_off))
    monkeypatch.setattr(time, "time", lambda: BOOTED_S + keeper.boot_clock_s())
    assert stamps_ahead_s(tmp_path) == BOOTED_S + DAY_S
    (tmp_path / "started").write_text(json.dumps(started | day_off | {"boot": "earlier"}))
    assert stamps_ahead_s(tmp_path) == pytest.approx(BOOTED_S), "the clock of an earlier boot is gone"
    (tmp_path / "started").unlink()
    assert stamps_ahead_s(tmp_path) == pytest.approx(BOOTED_S)


def test_a_keeper_writes_the_offset_of_its_stamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - DAY_S)
    spec = {"log_file_bytes": 1000, "log_files": 2, "grace_s": 1.0, "command": ["true"]}
    kept = keeper.Keeper(str(tmp_path), spec)
    os.umask(kept.umask)
    kept.pid = os.getpid()
    kept.record_start()
    monkeypatch.undo()  # the clock is repaired
    kept.log.take(b"late\n")
    kept.log.file.close()
    (here,) = read_lines(tmp_path, 0)
    assert here.at_s == pytest.approx(time.time(), abs=60.0), "read on this machine"
    ahead_s = stamps_ahead_s(tmp_path) + keeper.boot_clock_s() - time.time()
    assert ahead_s == pytest.approx(-DAY_S, abs=60.0)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "log.0").write_bytes(with_our_clock((tmp_path / "log.0").read_bytes(), ahead_s))
    (there,) = read_lines(tmp_path / "copy", 0)
    assert there.at_s == pytest.approx(time.time(), abs=60.0), "shipped to a control plane"


def test_lines_without_a_time_and_clocks_that_agree_are_left_as_they_are() -> None:
    assert with_our_clock(b"no time\n", 5.0) == b"no time\n"
    assert with_our_clock(LINE, 0.001) is LINE
    # A year that cannot be written stays, too.
    assert with_our_clock(b"0001-01-01T00:00:00.000000Z x\n", 10.0) == b"0001-01-01T00:00:00.000000Z x\n"
