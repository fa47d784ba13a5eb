"""Names of arrays in commands about jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Array, Job

#: The states of a job, as a person reads them: what happens now first.
ORDER = ("running", "starting", "stopping", "pending", "paused", "succeeded", "failed", "cancelled")


def array_named(client: Client, name: str) -> Array | None:
    """The array of this name, if there is one. A number is always that of a job."""
    from shoal.client.errors import NotFound

    if name.isdigit():
        return None
    try:
        return client.array(name)
    except NotFound:
        return None


def job_or_array(client: Client, name: str) -> Job | Array:
    """The job of this name, otherwise the array. Raises NotFound."""
    from shoal.client.errors import NotFound

    try:
        return client.job(name)
    except NotFound:
        array = array_named(client, name)
        if array is None:
            raise
        return array


@contextlib.contextmanager
def one_job(client: Client, name: str, command: str, *, state: str | None = None) -> Iterator[None]:
    """If no job has this name, but an array has: say so, with an example for `command`.

    The example is a job in this state, if there is one.
    """
    from shoal.client.errors import NotFound
    from shoal.core.errors import ShoalError

    try:
        yield
    except NotFound:
        array = array_named(client, name)
        if array is None:
            raise
        one = client.jobs(array=array.id, states=[state], limit=1) if state else []
        example = one[0].name if one else client.job(array.first).name
        raise ShoalError(
            f"{name} is an array of {array.tasks} jobs; name one of them, as in `shoal {command} {example}` "
            f"(shoal ps --array {name} lists them)"
        ) from None


def states(array: Array) -> str:
    """`2 running, 3 pending`: what happens now first."""
    return ", ".join(f"{array.jobs[state]} {state}" for state in ORDER if array.jobs.get(state))
