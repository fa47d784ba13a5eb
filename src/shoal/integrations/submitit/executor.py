"""`AutoExecutor(cluster="shoal")`: each submitted function is a Shoal job."""

from __future__ import annotations

import os
import re
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from submitit.core import core

from shoal.client import Client
from shoal.client.shell import shell_environment
from shoal.integrations.submitit.job import ShoalJob
from shoal.server.api.models import JobSpec

#: Parameters of every submitit executor that Shoal has no use for.
IGNORED = ("mem_gb", "cpus_per_task")
#: Fields of a job that the executor sets itself.
OWN_FIELDS = frozenset({"name", "command", "workdir", "per_gpu"})
LONGEST_NAME = 50


class ShoalExecutor(core.PicklingExecutor):
    """Submits functions to the Shoal server of this machine, or to `$SHOAL_SERVER`.

    A task has one GPU: a job with `tasks_per_node=4` has four. `shoal_gpus="1..4"` makes the job elastic: its
    function uses `shoal.torch`, and the result is that of rank 0. All fields of a job file may be given with the
    prefix `shoal_`.
    """

    job_class = ShoalJob
    parameters: dict[str, Any]

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = python or sys.executable
        self._throttling = 0.0  # the server takes hundreds of jobs per second
        Client().close()  # without a server, say so now

    @classmethod
    def affinity(cls) -> int:
        return 0  # used only when it is asked for by name

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(JobSpec.model_fields) - OWN_FIELDS

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        ignored = [name for name in IGNORED if kwargs.get(name)]
        if ignored:
            warnings.warn(f"Shoal schedules GPUs only: {', '.join(ignored)} is ignored", stacklevel=4)
        before = self.parameters
        self.parameters = {**before, **kwargs}
        try:
            self._spec(self.folder)  # refuse what cannot be submitted where it is given
        except ValueError:
            self.parameters = before
            raise
        before.update(kwargs)  # AutoExecutor holds this very object
        self.parameters = before

    def _gpus(self) -> str:
        """As in a job file: a number, or a range for an elastic job."""
        if "gpus" in self.parameters:
            return str(self.parameters["gpus"])
        tasks = self.parameters.get("tasks_per_node", 1)
        gpus = self.parameters.get("gpus_per_node", tasks)
        if gpus != tasks:
            raise ValueError(
                f"a task on Shoal has one GPU: with gpus_per_node={gpus} set tasks_per_node={gpus}, not {tasks}"
                " (or shoal_gpus='1..4' for a function that uses shoal.torch)"
            )
        return str(self.parameters.get("nodes", 1) * tasks)

    def _num_tasks(self) -> int:
        """Results of a job. One whose size changes has one, that of rank 0."""
        gpus = self._gpus()
        return int(gpus) if gpus.isdecimal() and self.parameters.get("resize") != "live" else 1

    def _spec(self, folder: Path) -> JobSpec:
        given = {k: v for k, v in self.parameters.items() if k in self._valid_parameters()}
        env = shell_environment() | given.pop("env", {}) | {"SUBMITIT_EXECUTOR": self.name()}
        if "timeout_min" in self.parameters:
            env["SUBMITIT_SHOAL_TIMEOUT_S"] = str(self.parameters["timeout_min"] * 60)
        if self.parameters.get("stderr_to_stdout"):
            env["SUBMITIT_STDERR_TO_STDOUT"] = "1"
        command = [self.python, "-u", "-m", "shoal.integrations.submitit.task", str(folder)]
        try:
            return JobSpec.model_validate(
                given
                | {"command": command, "workdir": os.getcwd(), "env": env}
                | {"gpus": self._gpus(), "name": self._job_name(), "per_gpu": True}
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            message = ": ".join([*map(str, first["loc"][:1]), first["msg"].removeprefix("Value error, ")])
            raise ValueError(f"shoal_{message}") from None  # as in a job file, the field comes first

    def _job_name(self) -> str:
        """Names of unfinished jobs are unique, and all functions of an array get one name: number them at random."""
        given = re.sub(r"[^A-Za-z0-9._-]+", "-", self.parameters.get("name", "submitit"))[:LONGEST_NAME]
        return f"{given.strip('._-') or 'submitit'}-{uuid.uuid4().hex[:8]}"

    def _submit_command(self, command: str) -> core.Job[Any]:
        with Client() as client:
            job = client.submit(self._spec(self.folder), idempotency_key=uuid.uuid4().hex)
        return self.job_class(self.folder, str(job.id), list(range(self._num_tasks())))

    # submitit's other executors run a command to submit; this one calls the server.

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError
