"""Jobs of the script `ways.py`, and what their workers wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_lab import QUICK, run_script

from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev

WAYS = Path(__file__).parent / "scripts" / "ways.py"
MISTAKES = Path(__file__).parent / "scripts" / "mistakes.py"
SHARDED_WAYS = Path(__file__).parent / "scripts" / "sharded_ways.py"
Rows = dict[str, list[dict[str, Any]]]


def rows(directory: Path) -> Rows:
    """worker -> its rows"""
    return {
        path.suffix[1:]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in directory.glob("rows.*")
    }


class Ways:
    def __init__(self, directory: Path, zygote: Zygote, script: Path = WAYS) -> None:
        self.directory, self._zygote, self._script = directory, zygote, script

    def say(self, name: str) -> None:
        (self.directory / name).touch()

    def job(
        self, way: str, workers: int, keep_size: bool = False, hang_s: float = QUICK.hang_s, **env: str
    ) -> LocalJob:
        return LocalJob(
            [str(self._script)],
            workers,
            directory=self.directory,
            env={"WAY": way, "WAY_DIR": str(self.directory), **env},
            zygote=self._zygote,
            keep_size=keep_size,
            timing=replace(QUICK, hang_s=hang_s),
        )

    def run(
        self,
        way: str,
        workers: int,
        story: Callable[[LocalJob], None] = lambda job: None,
        hang_s: float = QUICK.hang_s,
        **env: str,
    ) -> Rows:
        """Train to the end, with a story on the way. Returns the rows."""
        with self.job(way, workers, hang_s=hang_s, **env) as job:
            job.wait_size(workers)
            story(job)
            self.say("hurry")
            end = job.wait_end()
            assert isinstance(end, ev.JobFinished), end
            job.wait_gone(30)
            assert job.failed_after_end is None, job.logs()
        return self.rows()

    def rows(self) -> Rows:
        return rows(self.directory)

    def fail(
        self, way: str, workers: int, story: Callable[[LocalJob], None] = lambda job: None, **env: str
    ) -> str:
        """The job fails. Returns why."""
        with self.job(way, workers, **env) as job:
            story(job)
            self.say("hurry")
            end = job.wait(lambda e: isinstance(e, (ev.JobFinished, ev.JobFailed)), 120)
            if isinstance(end, ev.JobFailed):
                return end.why
            job.wait_gone(30)  # all had done their training when the first of them failed
            assert job.failed_after_end is not None, f"the job ended with {end}"
            return job.logs()

    def alone(self, way: str, **env: str) -> list[dict[str, Any]]:
        """The same script as a plain process outside Shoal."""
        where = self.directory / "alone"
        where.mkdir()
        (where / "hurry").touch()
        exit_, text = run_script(
            self._zygote, [str(self._script)], {"WAY": way, "WAY_DIR": str(where), **env}, where
        )
        assert exit_.ok, f"{exit_}: {text}"
        return rows(where)["alone"]


def notes(job: LocalJob) -> list[str]:
    return [note for _, e in job.events if isinstance(e, ev.Measured) for note in e.report.notes]


def grow(job: LocalJob) -> None:
    """From two workers to three."""
    job.resize(3)
    job.wait_size(3)


def grow_and_shrink(job: LocalJob) -> None:
    """From two workers to three, and back to two."""
    grow(job)
    job.resize(2)
    since = len(job.events)
    job.wait_size(2, since=since)
