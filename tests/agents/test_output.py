"""Output of workers on its way from the files of a keeper to the control plane's copy: nothing is lost silently."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

import pytest

from shoal.agents.agent_state import CHUNK_BYTES, WINDOW_BYTES, AgentState, Send
from shoal.agents.fleet_records import AppendLog
from shoal.agents.fleet_records import Send as Answer
from shoal.agents.fleet_state import FleetState
from shoal.agents.log_files import LogCopy, read_output
from shoal.executors.keeper import LONGEST_LINE, STAMP_BYTES, Log
from shoal.executors.logs import end_position, read_lines
from shoal.wire import agent_messages as am


class Shipping:
    """An agent and a control plane with their files, and acknowledgements that arrive when the test says so."""

    def __init__(
        self, directory: Path, workers: int = 1, file_bytes: int = 1 << 20, files: int = 100
    ) -> None:
        node = am.NodeFacts("a", workers, "virtual", True)
        self.agent = AgentState("a", "run", (node,))
        self.fleet = FleetState("epoch")
        self.acks: deque[am.AgentMessage] = deque()
        self.kept = {f"1.{i}": directory / "kept" / f"1.{i}" for i in range(workers)}
        self.copy = {worker: directory / "copy" / worker for worker in self.kept}
        self.logs: dict[str, Log] = {}
        self.copies = LogCopy(file_bytes=1 << 20, files=100)
        effects = self.fleet.hello(self.agent.connected(0.0, 0.0), "instance", 0.0, 0.0)
        for worker in self.kept:
            self.kept[worker].mkdir(parents=True)
            self.copy[worker].mkdir(parents=True)
            self.logs[worker] = Log(str(self.kept[worker]), file_bytes, files)
            copy = str(self.copy[worker])
            effects += self.fleet.start(am.Start(worker, "a", 0, ("true",), "/", {}, copy))
        for effect in effects:
            if isinstance(effect, Answer):
                self.agent.received(effect.message, 0.0)

    def ship(self) -> bool:
        """The agent sends what it may, as its shell does. Return whether it sent anything."""
        sent = False
        for read in self.agent.log_reads():
            position, data = read_output(self.kept[read.worker], read.begin, read.max_bytes)
            exited = self.agent.workers[read.worker].exited
            if not data and exited is not None:
                position = exited.log_end
            for effect in self.agent.log_read(read, position, data):
                assert isinstance(effect, Send)
                self.arrive(effect.message)
                sent = True
        return sent

    def arrive(self, message: am.FromAgent) -> None:
        assert not isinstance(message, am.AgentHello | am.FetchTree | am.Probed)
        for effect in self.fleet.received("a", am.decode(am.encode(message)), 0.0, 0.0):  # type: ignore[arg-type]
            if isinstance(effect, AppendLog):
                self.copies.append(Path(effect.directory), effect.position, effect.data)
            elif isinstance(effect, Answer):
                self.acks.append(effect.message)

    def acknowledge(self, count: int) -> None:
        for _ in range(min(count, len(self.acks))):
            self.agent.received(self.acks.popleft(), 0.0)

    def end(self, worker: str = "1.0") -> None:
        self.logs[worker].end()
        self.logs[worker].file.close()
        ended = am.Exited(worker, code=0, log_end=end_position(self.kept[worker]))
        for effect in self.agent.exited(ended, 0.0):
            assert isinstance(effect, Send)
            self.arrive(effect.message)

    def ship_all(self) -> None:
        while self.ship() or self.acks:
            self.acknowledge(1)

    def lines(self, worker: str = "1.0") -> list[str]:
        found, begin = [], 0
        while lines := read_lines(self.copy[worker], begin):
            found += [line.text for line in lines]
            begin = lines[-1].end
        return found


def numbered(count: int) -> list[bytes]:
    """Lines of very different lengths: the longest that a keeper writes are among them."""
    return [b"%d " % i + b"x" * (LONGEST_LINE - 20 if i % 50 == 0 else i % 90) for i in range(count)]


def texts(lines: list[bytes]) -> list[str]:
    return [line.decode() for line in lines]


@pytest.mark.parametrize("acks", [1, 3, 100])
def test_output_far_larger_than_the_window_arrives_complete_after_the_worker_has_ended(
    tmp_path: Path, acks: int
) -> None:
    shipping = Shipping(tmp_path)
    lines = numbered(12_000)
    shipping.logs["1.0"].take(b"\n".join(lines) + b"\n")
    shipping.end()
    assert end_position(shipping.kept["1.0"]) > 4 * WINDOW_BYTES
    while True:
        while shipping.ship():
            pass
        if not shipping.acks:
            break
        shipping.acknowledge(acks)  # the window is full until then
    assert shipping.lines() == texts(lines)


def test_output_of_a_running_worker_over_many_files_waits_for_acknowledgements_and_is_complete(
    tmp_path: Path,
) -> None:
    shipping = Shipping(tmp_path, file_bytes=50_000)
    lines = numbered(12_000)
    for begin in range(0, len(lines), 500):
        shipping.logs["1.0"].take(b"\n".join(lines[begin : begin + 500]) + b"\n")
        while shipping.ship():
            pass  # no acknowledgement arrives until the window is full
        worker = shipping.agent.workers["1.0"]
        assert worker.log_sent - worker.log_acked <= WINDOW_BYTES
        if worker.log_sent < end_position(shipping.kept["1.0"]):
            shipping.acknowledge(len(shipping.acks))
    shipping.ship_all()
    shipping.end()
    shipping.ship_all()
    assert shipping.lines() == texts(lines)


def test_what_is_rotated_away_before_it_could_be_sent_is_said_where_it_was(tmp_path: Path) -> None:
    shipping = Shipping(tmp_path, file_bytes=100_000, files=3)
    lines = [b"%06d" % i + b"x" * 94 for i in range(40_000)]
    size = len(lines[0]) + STAMP_BYTES
    shipping.logs["1.0"].take(b"\n".join(lines[:100]) + b"\n")
    shipping.ship()
    for begin in range(100, len(lines), 1000):  # the connection stalls
        shipping.logs["1.0"].take(b"\n".join(lines[begin : begin + 1000]) + b"\n")
    shipping.end()
    shipping.ship_all()
    found = shipping.lines()
    notes = [line for line in found if line.startswith("[")]
    (note,) = notes
    dropped = len(lines) - (len(found) - 1)
    assert dropped > 0
    megabytes = re.fullmatch(r"\[([0-9.]+) MB of earlier output were dropped: only .*\]", note)
    assert megabytes is not None
    assert float(megabytes[1]) == pytest.approx(dropped * size / 1e6, abs=0.06)
    assert found == [*texts(lines[:100]), note, *texts(lines[100 + dropped :])]


def test_output_whose_files_are_gone_when_the_worker_has_ended_is_said_to_be_dropped(tmp_path: Path) -> None:
    shipping = Shipping(tmp_path)
    shipping.logs["1.0"].take(b"first\n")
    shipping.ship()
    shipping.logs["1.0"].take(b"second\n" * 100)
    shipping.end()
    for path in shipping.kept["1.0"].glob("log.*"):
        path.unlink()
    shipping.ship_all()
    first, note = shipping.lines()
    assert first == "first"
    assert "kB of earlier output were dropped" in note


def test_idle_workers_do_not_keep_the_output_of_others_from_being_sent(tmp_path: Path) -> None:
    workers = WINDOW_BYTES // CHUNK_BYTES + 5
    shipping = Shipping(tmp_path, workers)
    last = f"1.{workers - 1}"
    shipping.logs[last].take(b"here\n")
    shipping.ship_all()
    assert shipping.lines(last) == ["here"]


def test_a_worker_that_prints_without_end_leaves_room_for_the_others(tmp_path: Path) -> None:
    shipping = Shipping(tmp_path, 2)
    shipping.logs["1.0"].take(b"much\n" * 200_000)
    while shipping.ship():
        pass  # the window is full
    shipping.logs["1.1"].take(b"little\n")
    shipping.acknowledge(2)
    shipping.ship()
    assert shipping.lines("1.1") == ["little"]


def test_nothing_on_disk_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log.0").write_bytes(b"one\n" + b"a line that is torn off")
    (tmp_path / "log.27").write_bytes(b"three\nfour")
    assert read_output(tmp_path, 0, 100) == (0, b"one\n")
    assert read_output(tmp_path, 4, 100) == (4, b"a line that is torn off"), "another file follows"
    assert read_output(tmp_path, 27, 100) == (27, b"three\n")
    assert read_output(tmp_path, 33, 100) == (33, b""), "it may still get its end"
    assert read_output(tmp_path, 33, 3) == (33, b"fou"), "a line that no chunk can hold is sent in parts"


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_a_copy_is_not_written_into_what_a_job_puts_in_its_place(tmp_path: Path, what: str) -> None:
    other, copies = tmp_path / "other", LogCopy()
    other.write_bytes(b"of another\n")
    if what == "link":
        (tmp_path / "log.0").symlink_to(other)
    else:
        os.mkfifo(tmp_path / "log.0")  # to open it would wait for a reader
    with pytest.raises(OSError):
        copies.append(tmp_path, os.lstat(tmp_path / "log.0").st_size, b"output\n")
    assert other.read_bytes() == b"of another\n"
