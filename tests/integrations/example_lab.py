"""Examples of training frameworks as elastic jobs of real processes."""

from __future__ import annotations

from pathlib import Path

from elastic_lab import QUICK, run_script, until

from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACED = Path(__file__).parent / "scripts" / "paced.py"


class ExampleLab:
    def __init__(self, directory: Path, zygote: Zygote, example: str) -> None:
        self.directory, self._zygote, self._example = directory, zygote, EXAMPLES / example

    def alone(self, **env: str) -> Path:
        """Run it as a plain process. Returns its output directory."""
        where = self.directory / "alone"
        where.mkdir()
        (where / "hurry").touch()
        exit_, text = run_script(
            self._zygote, [str(PACED), str(self._example)],
            {"LAB_DIR": str(where), "OUTPUT_DIR": str(where / "out"), **env}, where,
        )  # fmt: skip
        assert exit_.ok, f"{exit_}: {text}"
        return where / "out"

    def resized(self, *, kill: bool = True, **env: str) -> Path:
        """Run it with two workers, resize it three times, and `kill` a worker. Returns its output directory."""
        where = self.directory / "elastic"
        where.mkdir()
        job = LocalJob(
            [str(PACED), str(self._example)], 2, directory=where, zygote=self._zygote, timing=QUICK,
            env={"LAB_DIR": str(where), "OUTPUT_DIR": str(where / "out"), **env},
        )  # fmt: skip
        with job:
            job.wait_size(2)
            for size in (3, 1, 2):
                since = len(job.events)
                job.resize(size)
                job.wait_size(size, since=since)
            if kill:
                since = len(job.events)
                job.kill(job.handle.state.active.members[0])  # rank 0
                job.wait(lambda e: isinstance(e, ev.GenerationCommitted), 60, since)
                until(lambda: job.handle.state.active is not None)
            (where / "hurry").touch()
            end = job.wait_end()
            assert isinstance(end, ev.JobFinished), (end, job.logs())
            job.wait_gone(60)
        return where / "out"
