"""Reading log files."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from shoal.executors import keeper
from shoal.executors.keeper_files import read_ended
from shoal.executors.logs import position_at, read_lines, tail_position


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_a_job_puts_in_the_place_of_its_output_is_not_read(tmp_path: Path, what: str):
    (tmp_path / "token").write_text("of another\n")
    directory = tmp_path / "worker"
    directory.mkdir()
    for name in ("log.0", "exit"):
        if what == "link":
            (directory / name).symlink_to(tmp_path / "token")
        else:
            os.mkfifo(directory / name)  # to open it would wait for a writer
    assert read_lines(directory, 0) == []
    assert tail_position(directory, 5) == 0
    assert position_at(directory, 1.0) == 0
    assert read_ended(directory) is None


@pytest.mark.parametrize("seed", range(30))
def test_the_position_of_a_time_is_that_of_its_first_line_also_over_rotated_files(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    at_s, position, begin, part = 1000.0, 0, 0, b""
    starts: list[tuple[float, int]] = []
    for _ in range(rng.randrange(40)):
        at_s += rng.choice([0, 0, 1, 5])
        stamp = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
        line = f"{stamp}Z {'x' * rng.randrange(30)}\n".encode()
        starts.append((at_s, position))
        part, position = part + line, position + len(line)
        if rng.random() < 0.15:
            (tmp_path / f"log.{begin}").write_bytes(part)
            begin, part = position, b""
    (tmp_path / f"log.{begin}").write_bytes(part)
    times_s = [999.0, *(at_s for at_s, _ in starts), *(rng.uniform(999, at_s + 2) for _ in range(9))]
    for since_s in times_s:
        expected = next((start for at_s, start in starts if at_s >= since_s), position)
        assert read_lines(tmp_path, position_at(tmp_path, since_s)) == read_lines(tmp_path, expected), since_s


def test_a_time_is_found_by_reading_few_lines_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shoal.executors import logs

    lines = b"".join(
        f"2026-01-01T{i // 3600:02d}:{i // 60 % 60:02d}:{i % 60:02d}.000000Z line {i}\n".encode()
        for i in range(80_000)
    )
    (tmp_path / "log.0").write_bytes(lines)
    read: list[int] = []
    parse = logs._line
    monkeypatch.setattr(logs, "_line", lambda raw, end: (read.append(end), parse(raw, end))[1])
    since_s = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()
    position = position_at(tmp_path, since_s)
    assert len(read) < 40
    assert read_lines(tmp_path, position, 100)[0].text == f"line {12 * 3600}"
    assert position_at(tmp_path, since_s + 1e9) == len(lines)


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path):
    path = tmp_path / "log.0"
    path.write_bytes(b"2026-01-01T00:00:00.000000Z first\n")
    first = path.stat().st_size
    os.truncate(path, 200_000_000)  # a job under this account may have made it longer
    tracemalloc.start()
    try:
        assert position_at(tmp_path, datetime(2026, 1, 2, tzinfo=UTC).timestamp()) == first
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 10_000_000


def test_a_line_says_how_much_of_the_head_was_dropped(tmp_path: Path):
    kept = b"2026-01-01T00:00:01.000000Z kept\n"
    (tmp_path / "log.2500000").write_bytes(kept)
    lines = read_lines(tmp_path, 0)
    assert [line.text for line in lines] == [
        "[2.5 MB of earlier output were dropped: only the newest files of a worker's output are kept]",
        "kept",
    ]
    assert [line.end for line in lines] == [2_500_000, 2_500_000 + len(kept)]
    assert lines[0].at_s == lines[1].at_s
    assert [line.text for line in read_lines(tmp_path, lines[0].end)] == ["kept"], "it is said once"
    assert read_lines(tmp_path, position_at(tmp_path, 0.0)) == lines


def test_a_line_without_an_end_before_another_file_does_not_stop_the_reader(tmp_path: Path):
    (tmp_path / "log.0").write_bytes(b"2026-01-01T00:00:01.000000Z one\n2026-01-01T00:00:02.000000Z torn")
    (tmp_path / "log.90").write_bytes(b"2026-01-01T00:00:03.000000Z three\n2026-01-01T00:00:04.0")
    lines = read_lines(tmp_path, 0)
    assert [line.text for line in lines] == [
        "one",
        "torn",
        "[26 bytes of earlier output were dropped: only the newest files of a worker's output are kept]",
        "three",
    ]
    assert read_lines(tmp_path, lines[0].end) == lines[1:]


def test_a_keeper_on_a_full_disk_ends_the_line_that_it_could_not_finish(tmp_path: Path):
    log = keeper.Log(str(tmp_path), 1000, 10)

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:40])

    log.file.close()
    log.file = FullDisk(tmp_path / "log.0", "ab")
    log.take(b"first\n" * 5)
    log.file.close()
    log.file = (tmp_path / "log.0").open("ab", buffering=0)
    log.take(b"second\n")
    log.file.close()
    texts = [line.text for line in read_lines(tmp_path, 0)]
    lost = 5 * (len("first") + keeper.STAMP_BYTES) - 40
    assert texts[0] == "first"
    assert texts[2:] == [f"[{lost} bytes of output were lost: the disk was full]", "second"]


def test_output_that_was_lost_until_the_end_is_mentioned_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = keeper.Keeper(str(tmp_path), {"log_file_bytes": 1000, "log_files": 10})
    os.umask(kept.umask)

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "full")

    def written_when_there_is_room(path: str, value: object) -> None:
        kept.log.file.close()
        kept.log.file = (tmp_path / "log.0").open("ab", buffering=0)

    monkeypatch.setattr(keeper, "write_json", written_when_there_is_room)
    kept.log.file.close()
    kept.log.file = FullDisk(tmp_path / "log.0", "ab")
    kept.log.take(b"the last words\n")
    kept.log.end()
    assert read_lines(tmp_path, 0) == []
    kept.status = 0
    kept.record_end()
    kept.log.file.close()
    assert "bytes of output were lost: the disk was full]" in read_lines(tmp_path, 0)[0].text


def test_a_clock_that_is_set_while_a_job_runs_moves_none_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now_s, booted_s = 1_000_000_000.0, 999_000_000.0
    started = {"pid": 1, "start_time": 1, "keeper_pid": 1, "keeper_start_time": 1, "boot": keeper.boot_id()}
    for worker, day_off_s in (
        ("before", -86400.0),
        ("after", 0.0),
    ):  # the clock is repaired between their starts
        (tmp_path / worker).mkdir()
        offset = {"wall_offset_s": booted_s + day_off_s}
        (tmp_path / worker / "started").write_text(json.dumps(started | offset))
        stamp = datetime.fromtimestamp(now_s - 5 + day_off_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        (tmp_path / worker / "log.0").write_text(f"{stamp} hello\n")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "log.0").write_bytes((tmp_path / "after" / "log.0").read_bytes())
    monkeypatch.setattr(keeper, "boot_clock_s", lambda: now_s - booted_s)
    monkeypatch.setattr(time, "time", lambda: now_s)
    for worker in ("before", "after", "copy"):
        (line,) = read_lines(tmp_path / worker, 0)
        assert line.at_s == now_s - 5
        assert position_at(tmp_path / worker, now_s - 6) == 0
        assert position_at(tmp_path / worker, now_s - 4) == line.end
    (tmp_path / "before" / "started").write_text(json.dumps(started | {"wall_offset_s": 1e300}))
    assert read_lines(tmp_path / "before", 0)[0].at_s == now_s - 5 - 86400.0, "the job wrote that"
