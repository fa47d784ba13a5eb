"""The process of a task: `python -m shoal.integrations.submitit.task FOLDER`.

It runs the submitted function as submitit does, and writes its output both to Shoal's log and to submitit's files.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from submitit.core.submission import process_job

from shoal.integrations.submitit.environment import ShoalJobEnvironment

#: Set while the output is copied: a task that starts itself again after a timeout inherits the copying.
COPYING = "SUBMITIT_SHOAL_COPYING"
LAST_LINES_S = 10.0


def main() -> None:
    os.environ["SUBMITIT_FOLDER"] = folder = sys.argv[1]
    environment = ShoalJobEnvironment()
    paths = environment.paths
    paths.folder.mkdir(parents=True, exist_ok=True)
    merged = bool(os.environ.get("SUBMITIT_STDERR_TO_STDOUT"))
    with copied({1: paths.stdout, 2: paths.stdout if merged else paths.stderr}):
        try:
            process_job(folder)
        except Exception:
            sys.excepthook(*sys.exc_info())  # while the output is still copied; shoal.torch reports it here
            sys.exit(1)
        if environment.elastic:
            publish(paths.result_pickle)


@contextlib.contextmanager
def copied(files: dict[int, Path]) -> Iterator[None]:
    """Append what is written to these descriptors to files, too."""
    if os.environ.get(COPYING):
        yield
        return
    os.environ[COPYING] = "1"
    copiers = []
    for descriptor, path in files.items():
        # In a session of its own: a signal to the job's processes must not cut off its last lines.
        copier = subprocess.Popen(
            ["tee", "-a", path], stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True
        )
        copiers.append((copier, descriptor, os.dup(descriptor)))
    for copier, descriptor, _ in copiers:
        assert copier.stdin is not None
        os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for copier, descriptor, original in copiers:
            os.dup2(original, descriptor)
            # a process that the function left behind may write on
            with contextlib.suppress(subprocess.TimeoutExpired):
                copier.wait(LAST_LINES_S)


def publish(result: Path) -> None:
    """Make the result of this worker that of the job, unless another worker is rank 0."""
    from shoal.torch import current

    job = current()
    if job is None or job.parts.session.rank == 0:  # it may not have trained
        os.replace(result, result.with_name(f"{os.environ['SHOAL_JOB']}_0_result.pkl"))


if __name__ == "__main__":
    main()
