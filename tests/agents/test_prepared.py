"""What goes wrong while a worker's directory is prepared, in either half of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.agents import trees
from shoal.agents.prepared import PreparingExecutor
from shoal.agents.trees import TreeFetcher, Workdirs
from shoal.executors.base import Exit, RunAs, WorkerSpec

SPEC = WorkerSpec("1.0", Path("/d"), "n", 0, ("x",), "/home/ada", {}, tree="t")


class Inner:
    name = "local"

    def __init__(self, failure: Exception | None = None) -> None:
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.on_exit = self.exits.put_nowait
        self.failure = failure

    def start(self, worker: WorkerSpec) -> None:
        if self.failure is not None:
            raise self.failure


def exit_of(inner: Inner, prepare: Any) -> Exit:
    async def story() -> Exit:
        executor = PreparingExecutor(inner, prepare)  # type: ignore[arg-type]
        executor.start(SPEC)
        return await asyncio.wait_for(inner.exits.get(), 30)

    return asyncio.run(story())


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), ValueError("Input/output error")])
@pytest.mark.parametrize("where", ["preparing", "starting"])
def test_a_worker_that_cannot_start_is_reported_whatever_went_wrong(failure: Exception, where: str) -> None:
    async def prepare(job: str, tree: str, account: RunAs) -> Path:
        if where == "preparing":
            raise failure
        return Path("/there")

    ended = exit_of(Inner(failure if where == "starting" else None), prepare)
    assert not ended.began
    assert "Input/output error" in ended.why


def test_a_directory_is_provided_although_no_other_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    async def story() -> None:
        fetcher = TreeFetcher(tmp_path / "trees", lambda _: None)
        fetcher.path("t").write_bytes(bytes(10240))  # an archive without members
        monkeypatch.setattr(trees, "_measure", stale)
        assert (await Workdirs(tmp_path, fetcher, set).prepare("1", "t")).is_dir()

    asyncio.run(story())
    assert "Stale file handle" in caplog.text
