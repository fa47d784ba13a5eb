"""Helpers of the runtime's tests: jobs of the probe script, and the rows it wrote."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.executors.base import Exit, WorkerSpec
from shoal.executors.local import LocalExecutor
from shoal.executors.logs import read_lines
from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire.state import Timing

PROBE = Path(__file__).parent / "scripts" / "probe.py"
QUICK = Timing(heartbeat_timeout_s=3.0, reconnect_s=3.0, settle_s=0.5, hang_s=3.0)


class Lab:
    """Starts jobs of the probe script and reads the rows it wrote."""

    def __init__(self, directory: Path, zygote: Zygote) -> None:
        self.directory, self._zygote = directory, zygote

    def say(self, name: str, text: str = "yes") -> None:
        """Tell the probe script something. Renamed into place, so that no worker reads half of it."""
        (self.directory / f".{name}").write_text(text)
        (self.directory / f".{name}").rename(self.directory / name)

    def job(self, workers: int, script: Path = PROBE, **options: Any) -> LocalJob:
        keep_size = options.pop("keep_size", False)
        stragglers = options.pop("replace_stragglers", False)
        slow = options.pop("state_bytes_per_s", None)
        env = {"SHOAL_STATE_BYTES_PER_S": str(slow)} if slow else {}
        return LocalJob(
            [str(script)],
            workers,
            directory=self.directory,
            env={"PROBE": json.dumps(options), "PROBE_DIR": str(self.directory), **env},
            zygote=self._zygote,
            keep_size=keep_size,
            replace_stragglers=stragglers,
            timing=QUICK,
        )

    def alone(self, **options: Any) -> list[dict[str, Any]]:
        """The same script as a plain process outside Shoal."""
        where = self.directory / "alone"
        where.mkdir()
        (where / "hurry").write_text("yes")
        env = {"PROBE": json.dumps(options), "PROBE_DIR": str(where), "OMP_NUM_THREADS": "1"}
        exit_, text = run_script(self._zygote, [str(PROBE)], env, where)
        assert exit_.ok, f"{exit_}: {text}"
        return self.rows(where)

    def rows(self, where: Path | None = None) -> list[dict[str, Any]]:
        rows = []
        for path in sorted((where or self.directory).glob("steps.*")):
            rows += [
                {**json.loads(line), "worker": path.suffix[1:]}
                for line in path.read_text().splitlines()
                if line.endswith("}")
            ]
        return rows

    def finals(self, where: Path | None = None) -> dict[str, dict[str, Any]]:
        found = (where or self.directory).glob("final.*")
        return {p.suffix[1:]: json.loads(p.read_text()) for p in found}


def run_script(zygote: Zygote, argv: list[str], env: dict[str, str], where: Path) -> tuple[Exit, str]:
    """Run a script outside Shoal, from a warm process, to its end. Return how it ended and its output."""

    async def run() -> Exit:
        executor = LocalExecutor(1, zygote=zygote)
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        executor.on_exit = ended.set_result
        full_env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        command = (sys.executable, *argv)
        executor.start(
            WorkerSpec("alone", where / "worker", "local", 0, command, str(where), full_env, warm=True)
        )
        return await asyncio.wait_for(ended, 300)

    exit_ = asyncio.run(run())
    return exit_, "\n".join(line.text for line in read_lines(where / "worker", 0))


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    """The loss of each step over the whole batch, summed over micro-batches."""
    total: dict[int, float] = defaultdict(float)
    for row in rows:
        total[row["step"]] += row["weight"] * row["loss"]
    return dict(total)


def seen(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The samples of each epoch, sorted."""
    ids: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        ids[row["epoch"]] += row["ids"]
    return {epoch: sorted(i) for epoch, i in ids.items()}


def until(true: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Wait until it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.02)
