"""Helpers of the runtime's tests: jobs of the probe script, and the rows it wrote."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.torch.local import LocalJob
from shoal.torch.zygote import Zygote
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
        codes: dict[int, int] = {}
        self._zygote.listeners.append(codes.__setitem__)
        pid = self._zygote.start([str(PROBE)], env, str(where), str(where / "log"))
        until(lambda: pid in codes, 90)
        self._zygote.listeners.remove(codes.__setitem__)
        assert codes[pid] == 0, f"exit code {codes[pid]}: {(where / 'log').read_text()}"
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
