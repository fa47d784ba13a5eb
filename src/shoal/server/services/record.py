"""Record submitted jobs: their rows, directories, secrets and events, in one transaction."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.job import GpuRange
from shoal.knowledge.auto_gpus import AutoGpus
from shoal.server.api.models import JobSpec, JobState
from shoal.server.api.models.tasks import Task
from shoal.server.home import Home
from shoal.server.loop.lifecycle import Life
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.naming import hash_of, model_word, short_name
from shoal.server.store import tables as t
from shoal.server.store.change import Change
from shoal.server.store.store import Store, StoreFull
from shoal.wire.atomic_file import write_atomically

#: Fields of a submission that describe the array, not one of its jobs.
_OF_ARRAY = {"array", "sweep", "max_running"}


@dataclass(frozen=True, slots=True)
class Submission:
    """A job, or an array of jobs that differ only in their tasks, as it was checked."""

    spec: JobSpec
    user: str
    gpus: GpuRange
    requested_gpus: int
    #: The size that was chosen for a job that left it open.
    size: AutoGpus | None
    needs: dict[str, Any] | None
    #: The jobs that it waits for: [{"job": 12, "name": "prepare", "on": "success"}].
    after: list[dict[str, Any]]
    key: str | None
    #: Of what was submitted, before a size was chosen: the same key and body give the same job.
    body_hash: str
    #: Empty for a single job.
    tasks: Sequence[Task] = field(default=())
    max_running: int | None = None


def recorded(submission: Submission, store: Store, home: Home, now_s: float) -> list[LiveJob]:
    """The jobs of a submission, now on record. If anything fails, nothing is."""
    made: list[Path] = []
    try:
        with store.change(now_s, actor=submission.user) as change:
            rows = list(_rows(submission, _new_array(change, submission), now_s))
            for job_id, row in zip(change.add_jobs(rows), rows):
                row["id"] = job_id
                if not row["name"]:
                    row["name"] = f"{short_name(submission.spec.command)}-{job_id}"
                    change.update_job(job_id, name=row["name"])
                directory = home.job(job_id)
                _make_directory(directory)
                made.append(directory)  # only from here on it is ours to remove
                _write_secrets(directory, submission.spec.secrets)
                _record_events(change, row, submission)
            if submission.key is not None:
                user, key, digest = submission.user, submission.key, submission.body_hash
                change.add_idempotency(user, key, digest, rows[0]["id"])
    except BaseException:
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return [_live(row, submission, now_s) for row in rows]


def body_hash(spec: JobSpec) -> str:
    return hash_of(spec.model_dump_json())


def _new_array(change: Change, submission: Submission) -> dict[str, Any] | None:
    """The array of the submission, now on record; None for a single job."""
    if not submission.tasks:
        return None
    row = {
        "name": submission.spec.name or "",
        "user": submission.user,
        "tasks": len(submission.tasks),
        "max_running": submission.max_running,
    }
    array_id = change.insert(t.arrays, **row)
    assert array_id is not None
    if not row["name"]:
        row["name"] = f"{short_name(submission.spec.command)}-a{array_id}"
        change.update(t.arrays, array_id, name=row["name"])
    return row | {"id": array_id}


def _rows(submission: Submission, array: Mapping[str, Any] | None, now_s: float) -> Iterator[dict[str, Any]]:
    """The rows of the jobs. A single job without a name gets one from its number, later."""
    spec = submission.spec
    whole = spec.model_dump(mode="json", exclude={"secrets", "after", *_OF_ARRAY})
    whole |= {"secrets": sorted(spec.secrets), "after": submission.after}
    row: dict[str, Any] = {
        "name": spec.name or "",
        "user": submission.user,
        "state": JobState.PENDING.value,
        "spec": whole,
        "given": sorted(spec.model_fields_set),
        "min_gpus": submission.gpus.min,
        "max_gpus": submission.gpus.max,
        "requested_gpus": submission.requested_gpus,
        "resize": spec.effective_resize.value,
        "model": spec.model or model_word(spec.command),
        "submitted_s": now_s,
        "settled_s": now_s,
        "progress": {"needs": submission.needs},
        "array": None,
        "array_index": None,
    }
    if array is None:
        yield row
        return
    for task in submission.tasks:
        mine = _spec_of_task(whole, submission, task, array)
        name = f"{array['name']}-{task.index}"
        yield row | {"name": name, "spec": mine, "array": array["id"], "array_index": task.index}


def _spec_of_task(
    whole: dict[str, Any], submission: Submission, task: Task, array: Mapping[str, Any]
) -> dict[str, Any]:
    labels = {key: str(value)[:100] for key, value in task.values.items()}
    found = whole | {
        "name": f"{array['name']}-{task.index}",
        "command": [task.fill(word) for word in whole["command"]],
        "env": {key: task.fill(value) for key, value in whole["env"].items()},
        "labels": labels | whole["labels"],
        "task": {"name": array["name"], "tasks": array["tasks"], "values": dict(task.values)},
    }
    if submission.max_running is not None:
        found["throttle"] = [f"array {array['id']}", submission.max_running]
    return found


def _live(row: dict[str, Any], submission: Submission, now_s: float) -> LiveJob:
    return LiveJob(
        id=row["id"],
        name=row["name"],
        user=row["user"],
        spec=row["spec"],
        given=row["given"],
        min_gpus=row["min_gpus"],
        max_gpus=row["max_gpus"],
        requested_gpus=row["requested_gpus"],
        resize=submission.spec.effective_resize,
        model=row["model"],
        life=Life.begin(now_s),
        needs=submission.needs,
        array=row["array"],
        array_index=row["array_index"],
    )


def _record_events(change: Change, row: dict[str, Any], submission: Submission) -> None:
    gpus, size = submission.gpus, submission.size
    wanted = f"{gpus} {'GPU' if gpus.max == 1 else 'GPUs'}"
    change.event(
        "job.submitted", f"submitted {row['name']} with {wanted}", job=row["id"], user=row["user"],
        data={"name": row["name"], "gpus": str(gpus), "resize": row["resize"]},
    )  # fmt: skip
    if size is not None:
        change.event(
            "job.sized", f"GPUs: {size.why}", job=row["id"], user=row["user"],
            data={"gpus": str(gpus), "known": size.known},
        )  # fmt: skip


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise StoreFull(f"cannot make {directory}: {error.strerror}; nothing was changed") from None


def _write_secrets(directory: Path, secrets: dict[str, str]) -> None:
    try:
        if secrets:
            write_atomically(directory / "secrets.json", json.dumps(secrets))
    except OSError as error:
        raise StoreFull(f"cannot write to {directory}: {error.strerror}; nothing was changed") from None
