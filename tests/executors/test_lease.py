"""Leases: a keeper kills its worker when the lease of its node has ended, whether or not the agent lives."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from shoal.executors.base import Exit, WorkerSpec
from shoal.executors.local import LocalExecutor


def set_lease(path: Path, seconds: float) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME) + seconds))
    os.replace(temporary, path)


def run_under_lease(
    directory: Path,
    first_s: float,
    renewals: int,
    *,
    suspended: bool = False,
    command: tuple[str, ...] = ("sleep", "2"),
) -> Exit:
    """The end of a worker that sleeps for 2 s. A renewal grants 30 s."""

    async def story() -> Exit:
        lease = directory / "lease"
        set_lease(lease, first_s)
        executor = LocalExecutor(1, lease_file=lease)
        end: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        executor.on_exit = end.set_result
        worker = directory / "1.0"
        executor.start(WorkerSpec("1.0", worker, "local", 0, command, "/tmp", {}))
        for _ in range(renewals):
            set_lease(lease, 30.0)
        while suspended and not (worker / "started").exists():
            await asyncio.sleep(0.01)
        if suspended:
            executor.suspend("1.0")
        return await asyncio.wait_for(end, 60)

    return asyncio.run(story())


def test_a_worker_whose_lease_is_renewed_ends_by_itself(tmp_path: Path) -> None:
    exit_ = run_under_lease(tmp_path, 10.0, 1)
    assert exit_.ok
    assert not exit_.node_lost


def test_a_worker_whose_lease_ends_is_killed(tmp_path: Path) -> None:
    exit_ = run_under_lease(tmp_path, 0.5, 0)
    assert not exit_.asked_to_end
    assert "lease of its node ended" in exit_.why
    assert exit_.node_lost, "the command did not fail: its machine was lost"


def test_a_command_that_ends_by_itself_is_not_ended_by_the_lease_of_what_it_left_behind(
    tmp_path: Path,
) -> None:
    left_behind = "trap '' TERM; exec sleep 100"
    exit_ = run_under_lease(tmp_path, 0.5, 0, command=("sh", "-c", f"(sh -c {left_behind!r})& exit 3"))
    assert exit_.code == 3
    assert not exit_.node_lost
    assert exit_.why == ""


def test_a_suspended_worker_whose_lease_ends_is_killed_too(tmp_path: Path) -> None:
    exit_ = run_under_lease(tmp_path, 3.0, 0, suspended=True)
    assert exit_.signal == "SIGKILL"
    assert "lease of its node ended" in exit_.why


def test_a_worker_does_not_start_after_the_lease(tmp_path: Path) -> None:
    exit_ = run_under_lease(tmp_path, -1.0, 0)
    assert exit_.code is None
    assert exit_.signal is None
    assert "lease of its node ended" in exit_.why
    assert not (tmp_path / "1.0" / "started").exists()
