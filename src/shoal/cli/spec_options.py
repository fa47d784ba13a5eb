"""From a command line to a job: what `run`, `submit` and `plan` share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.client.jobfile import Document
    from shoal.server.api.models import JobSpec

name_option = click.option("--name", help="Name of the job. Default: from the command.")
set_option = click.option(
    "--set", "settings", multiple=True, help="Change a value of the file: --set gpus=1..4. Repeat for more."
)
file_option = click.option("-f", "--file", required=True, help="Job file in YAML; - for standard input.")


def from_file(file: str, settings: Sequence[str], name: str | None) -> tuple[JobSpec, Document]:
    """The job of a job file, and the file's content."""
    from shoal.client import jobfile

    extra = [f"name={name}"] if name else []
    document = jobfile.with_settings(jobfile.read(file), [*settings, *extra])
    return jobfile.job_spec(document), document


def from_command(command: Sequence[str], **given: Any) -> JobSpec:
    """The job of a command line; the server chooses the options that are not given."""
    from shoal.client import jobfile

    data = {"command": list(command), "workdir": str(Path.cwd())} | {
        k: v for k, v in given.items() if v is not None
    }
    jobfile.recognise(data)
    return jobfile.check(jobfile.Document("command line", data, {}, {}), _spec())


def environment(settings: Sequence[str], option: str = "--env") -> dict[str, str]:
    """`NAME=value`, or `NAME` for its value here."""
    made = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals and name not in os.environ:
            raise ShoalError(f"{option} {name}: the variable is not set here; write {name}=value")
        made[name] = value if equals else os.environ[name]
    return made


def numbers(settings: Sequence[str], option: str) -> dict[str, float]:
    """`NAME=number`, several separated by commas. The check of the job refuses unknown names."""
    made = {}
    for setting in [part for word in settings for part in word.split(",")]:
        name, equals, value = setting.partition("=")
        try:
            made[name.strip()] = float(value)
        except ValueError:
            how = "write NAME=number" if not equals else f"{value!r} is not a number"
            raise ShoalError(f"{option} {setting}: {how}, such as gpu_mem_mb=6000") from None
    return made


def _spec() -> type[JobSpec]:
    from shoal.server.api.models import JobSpec

    return JobSpec
