"""Pauses and checkpoints through the control plane: workers that share no directory with it, and what can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_lab import Lab, seen, until

from shoal.torch.state_files import StateFiles
from shoal.wire import events as ev
from shoal.wire import job_files
from shoal.wire.auth import new_secret
from shoal.wire.channel import Channel
from shoal.wire.job_files import FILES, FRAME_BYTES, FileClient, own_name
from shoal.wire.messages import CheckFile, FileAnswer, FileEnd, StoreFile, WireError
from shoal.wire.service import ControlService


class NoProcesses:
    def start(self, job: str, worker: str) -> None: ...

    def stop(self, job: str, worker: str, kill: bool) -> None: ...


class Control:
    """A control plane with one job, whose files are in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.secret, self.directory, self.port = new_secret(), directory, 0
        self.opens_paths = True  # as for a job under the account of the control plane
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.start()

    def start(self) -> None:
        self.do(self._start())

    async def _start(self) -> None:
        self.service = ControlService(NoProcesses())
        self.address = await self.service.start(port=self.port)
        self.port = int(self.address.rpartition(":")[2])
        self.handle = self.service.add(
            "job", self.secret, files=self.directory, opens_paths=lambda: self.opens_paths
        )

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def stop(self) -> None:
        self.do(self.service.close())

    def open(self, secret: bytes | None = None) -> Channel:
        return Channel.open(self.address, secret or self.secret, "job", FILES)

    def files(self, directory: Path | None = None, patience_s: float = 0.0) -> StateFiles:
        self.notes: list[str] = []
        shared = str(directory) if directory is not None else None
        return StateFiles(FileClient(self.open, patience_s), shared, self.notes.append)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    (tmp_path / "kept").mkdir()
    control = Control(tmp_path / "kept")
    yield control
    control.stop()
    control.loop.call_soon_threadsafe(control.loop.stop)


DATA = os.urandom(3 * FRAME_BYTES + 12_345)


def write(file) -> None:
    file.write(DATA[:10])
    file.write(memoryview(DATA)[10:])


def read(files: StateFiles, location: str) -> bytes:
    with files.open(location) as file:
        return file.read()


def test_without_a_shared_directory_the_file_goes_to_the_control_plane_and_back(control: Control):
    files = control.files()
    assert files.save("job:paused.pt", write) == "job:paused.pt"
    assert (control.directory / "paused.pt").read_bytes() == DATA
    assert (control.directory / "paused.pt").stat().st_mode & 0o777 == 0o600
    assert read(files, "job:paused.pt") == DATA
    assert control.notes == []


def test_with_a_shared_directory_it_is_written_there_and_the_control_plane_has_seen_it(control: Control):
    files = control.files(control.directory)
    assert files.save("job:paused.pt", write) == "job:paused.pt"
    assert read(files, "job:paused.pt") == DATA
    assert [p.name for p in control.directory.iterdir()] == ["paused.pt"]


def test_a_directory_that_is_not_shared_does_not_count(control: Control, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    files = control.files(tmp_path / "elsewhere")
    files.save("job:paused.pt", write)
    assert (control.directory / "paused.pt").read_bytes() == DATA
    (tmp_path / "elsewhere" / "paused.pt").unlink()
    assert read(files, "job:paused.pt") == DATA


def test_a_directory_that_is_gone_does_not_count_and_is_not_made(control: Control, tmp_path: Path):
    files = control.files(tmp_path / "unmounted")
    files.save("job:paused.pt", write)
    assert (control.directory / "paused.pt").read_bytes() == DATA
    assert not (tmp_path / "unmounted").exists()
    assert "sending it to the control plane" in control.notes[0]


def test_an_older_file_at_the_same_place_is_not_taken_for_the_new_one(control: Control, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (control.directory / "paused.pt").write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    control.files(tmp_path / "elsewhere").save("job:paused.pt", write)
    assert (control.directory / "paused.pt").read_bytes() == DATA


def test_a_path_of_the_user_is_used_and_a_copy_kept_if_only_this_node_has_it(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = control.files()
    assert files.save(str(tmp_path / "mine.pt"), write) == str(tmp_path / "mine.pt")
    assert not (control.directory / "checkpoint.pt").exists()
    # The control plane is on this machine, too: let it look for the file where there is none.
    monkeypatch.setattr(job_files.JobFiles, "_path", lambda self, location: self.directory / "no" / "file")
    assert files.save(str(tmp_path / "mine.pt"), write) == "job:checkpoint.pt"
    assert (control.directory / "checkpoint.pt").read_bytes() == DATA
    assert "the control plane does not see" in control.notes[0]


def test_a_worker_reads_only_files_of_its_job_and_where_its_state_was_saved(control: Control, tmp_path: Path):
    (tmp_path / "mine.pt").write_bytes(b"state")
    client = FileClient(control.open)
    with pytest.raises(job_files.NotKept, match="did not save its state there"):
        client.fetch(str(tmp_path / "mine.pt"))
    control.handle.state.checkpoint = str(tmp_path / "mine.pt")
    assert client.fetch(str(tmp_path / "mine.pt")).read() == b"state"


def test_the_control_plane_opens_no_path_for_a_job_that_may_not_read_all_that_it_may(
    control: Control, tmp_path: Path
):
    """A worker can claim that its state was saved anywhere."""
    control.opens_paths = False
    (tmp_path / "token").write_bytes(b"of another")
    control.handle.state.checkpoint = str(tmp_path / "token")
    with pytest.raises(job_files.NotKept, match="opens no paths for this job"):
        FileClient(control.open).fetch(str(tmp_path / "token"))
    answers = []
    for name in ("token", "nothing"):
        with contextlib.closing(control.open()) as channel:
            channel.send(CheckFile(str(tmp_path / name), 10, "0"))
            answers.append(channel.receive().why.partition(":")[0])
    assert answers[0] == answers[1], "it does not tell which files exist"
    assert control.files().save(str(tmp_path / "mine.pt"), write) == "job:checkpoint.pt"


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_what_a_job_puts_in_the_place_of_its_file_is_not_read(control: Control, tmp_path: Path, what: str):
    place = control.directory / "paused.pt"
    if what == "link":
        (tmp_path / "token").write_bytes(b"of another")
        place.symlink_to(tmp_path / "token")
    elif what == "pipe":
        os.mkfifo(place)  # to open it would wait for a writer
    else:
        place.mkdir()
    with pytest.raises(job_files.NotKept, match=r"cannot read job:paused\.pt"):
        FileClient(control.open).fetch("job:paused.pt")
    assert not FileClient(control.open).sees("job:paused.pt", 1, "0")


@pytest.mark.parametrize(
    "name", ["secret", "../x.pt", "/etc/x.pt", ".x.pt", "a/b.pt", "x.pt\n", "x" * 200 + ".pt"]
)
def test_a_name_that_is_not_one_of_a_state_is_refused(control: Control, name: str):
    with pytest.raises(WireError):
        own_name("job:" + name)
    channel = control.open()
    channel.send(StoreFile("job:" + name))
    with pytest.raises(OSError):
        channel.receive()
    assert list(control.directory.iterdir()) == []


def test_a_file_that_did_not_arrive_completely_leaves_the_former_one(control: Control):
    (control.directory / "paused.pt").write_bytes(b"former")
    channel = control.open()
    channel.send(StoreFile("job:paused.pt"))
    channel.send_frame(b"half")
    channel.close()
    channel = control.open()
    channel.send(StoreFile("job:paused.pt"))
    channel.send_frame(b"half")
    channel.send_frame(b"")
    channel.send(FileEnd(8, "0" * 64))
    assert channel.receive() == FileAnswer(False, "not all of it arrived")
    channel.close()
    until(lambda: [p.name for p in control.directory.iterdir()] == ["paused.pt"])
    assert (control.directory / "paused.pt").read_bytes() == b"former"


def test_a_full_disk_of_the_control_plane_is_named(control: Control, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job_files.os, "fsync", full)
    with pytest.raises(OSError, match=r"could not keep paused\.pt: No space left on device"):
        control.files().save("job:paused.pt", write)
    assert list(control.directory.iterdir()) == []


def test_reading_waits_for_a_control_plane_that_was_killed(control: Control):
    files = control.files(patience_s=30.0)
    files.save("job:paused.pt", write)
    control.stop()
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(read(files, "job:paused.pt")))
    reading.start()
    with pytest.raises(OSError):
        control.files().save("job:paused.pt", write)
    control.start()
    reading.join(30)
    assert found == [DATA]


def test_left_overs_of_a_killed_control_plane_are_removed(control: Control):
    (control.directory / ".paused.pt.abcd.receiving").write_bytes(b"half")
    control.stop()
    control.start()
    assert list(control.directory.iterdir()) == []


def through_control(job) -> None:
    """From now on the job keeps its state at the control plane, as if its workers were on other machines."""
    job.processes.env["SHOAL_CHECKPOINT"] = "job:checkpoint.pt"
    job.handle.state.pause_path = "job:paused.pt"


def continued_from(location: str, step: int):
    text = f"continued from {location} at step {step}"
    return lambda e: isinstance(e, ev.Measured) and text in e.report.notes


def test_a_real_job_pauses_resumes_and_restarts_through_the_control_plane(lab: Lab):
    with lab.job(1, epochs=10, sleep_s=0.02, keep_size=True) as job:
        through_control(job)
        job.wait_size(1)
        since = len(job.events)
        job.migrate()  # to workers that know of no path
        job.wait_size(1, since=since)
        job.checkpoint()
        saved = job.wait(lambda e: isinstance(e, ev.Checkpointed))
        assert saved.path == "job:checkpoint.pt"
        job.kill(job.handle.state.target[0])
        job.wait(continued_from("job:checkpoint.pt", saved.step))
        job.resize(2)
        job.wait_size(2)
        job.pause()
        paused = job.wait(lambda e: isinstance(e, ev.JobPaused))
        assert paused.path == "job:paused.pt"
        until(lambda: not job.processes.running)
        job.resize(2)
        job.wait(continued_from("job:paused.pt", paused.step))
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)
    assert set(seen(lab.rows())[9]) == set(range(240))
    names = {p.name for p in lab.directory.iterdir() if p.suffix == ".pt"}
    assert names == {"checkpoint.pt", "paused.pt"}


def test_a_pause_that_the_control_plane_cannot_keep_waits_until_it_can(lab: Lab):
    with lab.job(1, epochs=10, sleep_s=0.02) as job:
        through_control(job)
        job.wait_size(1)
        (lab.directory / "paused.pt").mkdir()  # the file cannot get its name
        (lab.directory / "paused.pt" / "in the way").touch()
        job.pause()
        until(lambda: "the pause waits, because the state cannot be saved" in job.logs())
        assert not any(isinstance(e, ev.JobPaused) for _, e in job.events)
        assert job.handle.state.paused is None
        assert job.processes.running, "the worker that has the only copy stays"
        (lab.directory / "paused.pt" / "in the way").unlink()
        (lab.directory / "paused.pt").rmdir()
        paused = job.wait(lambda e: isinstance(e, ev.JobPaused))
        job.resize(1)
        job.wait(continued_from("job:paused.pt", paused.step))
