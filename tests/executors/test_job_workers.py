"""The processes of a standalone job: which GPU each worker gets, and what becomes of an earlier run's files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.executors.base import Exit, NodeInfo, WorkerSpec
from shoal.executors.job_workers import JobWorkers


class Recorder:
    """An executor that starts nothing."""

    def __init__(self) -> None:
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.specs: dict[str, WorkerSpec] = {}
        self.stopped: list[tuple[str, bool]] = []

    def nodes(self) -> tuple[NodeInfo, ...]:
        return (NodeInfo("a", 1, "a100", False, ("GPU-a",)), NodeInfo("b", 1, "v100", False, ("GPU-b",)))

    def start(self, worker: WorkerSpec) -> None:
        self.specs[worker.worker] = worker

    def stop(self, worker: str, *, kill: bool = False) -> None:
        self.stopped.append((worker, kill))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def exits() -> list[tuple[str, str, int | None]]:
    return []


@pytest.fixture
def workers(tmp_path: Path, recorder: Recorder, exits: list[tuple[str, str, int | None]]) -> JobWorkers:
    def exited(worker: str, why: str, code: int | None) -> None:
        exits.append((worker, why, code))

    return JobWorkers(recorder, tmp_path / "workers", ["train.py"], {"A": "1"}, exited, warm=True)  # type: ignore[arg-type]


def test_workers_spread_over_the_gpus_and_take_those_that_are_free(
    workers: JobWorkers, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for worker in ("w0", "w1", "w2"):
        workers.start("local", worker)
    assert [recorder.specs[w].node for w in ("w0", "w1", "w2")] == ["a", "b", "a"]
    recorder.on_exit(Exit("w1", 0, None, ""))
    workers.start("local", "w3")
    assert recorder.specs["w3"].node == "b"
    assert recorder.specs["w3"].env == {"A": "1", "SHOAL_WORKER": "w3"}
    assert workers.running == ["w0", "w2", "w3"]


@pytest.mark.parametrize(("chosen", "devices"), [("3,5", ["3", "5", "3"]), ("7", ["7"] * 3), ("", [""] * 3)])
def test_workers_use_only_the_devices_that_the_user_has_chosen(
    workers: JobWorkers, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, chosen: str, devices: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    for worker in ("w0", "w1", "w2"):
        workers.start("local", worker)
    assert [recorder.specs[w].env["CUDA_VISIBLE_DEVICES"] for w in ("w0", "w1", "w2")] == devices


def test_the_end_of_a_worker_is_described(
    workers: JobWorkers, recorder: Recorder, exits: list[tuple[str, str, int | None]]
) -> None:
    for worker in ("w0", "w1", "w2"):
        workers.start("local", worker)
    recorder.on_exit(Exit("w0", None, "SIGKILL", ""))
    recorder.on_exit(Exit("w1", 3, None, ""))
    recorder.on_exit(Exit("w2", None, None, "its keeper was killed"))
    assert exits == [
        ("w0", "killed by SIGKILL", None),
        ("w1", "ended with code 3", 3),
        ("w2", "its keeper was killed", None),
    ]


def test_a_worker_that_was_asked_over_the_wire_is_killed_only_after_its_grace(
    workers: JobWorkers, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        later: list[Callable[[], None]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda delay_s, act: later.append(act))
        workers.stop("local", "w0", kill=False)
        assert recorder.stopped == []
        later[0]()
        workers.stop("local", "w1", kill=True)
        assert recorder.stopped == [("w0", True), ("w1", True)]

    asyncio.run(story())


def test_files_of_an_earlier_run_are_removed(tmp_path: Path, recorder: Recorder) -> None:
    old = tmp_path / "workers" / "w0" / "exit"
    old.parent.mkdir(parents=True)
    old.write_text('{"code": 9}')
    JobWorkers(recorder, tmp_path / "workers", ["x.py"], {}, lambda w, why, code: None, warm=False)  # type: ignore[arg-type]
    assert not old.exists()
