"""`submitit.JobEnvironment()` within a task that Shoal runs: its rank, its files and its signals."""

from __future__ import annotations

import os
import signal
import sys
from typing import ClassVar

from submitit.core import job_environment, logger
from submitit.core.utils import DelayedSubmission, JobPaths


class ShoalJobEnvironment(job_environment.JobEnvironment):
    _env: ClassVar[dict[str, str]] = {
        "job_id": "SHOAL_JOB",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "SHOAL_NODES",
        "node": "SHOAL_NODE_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def elastic(self) -> bool:
        """Whether the workers of this job change; then a worker has no fixed rank."""
        return "SHOAL_CONTROL" in os.environ

    @property
    def paths(self) -> JobPaths:
        paths = JobPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)
        if self.elastic:
            paths.task_id = os.environ["SHOAL_WORKER"]
        return paths

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """Shoal sends SIGTERM to stop a job, and to a job with `resize: restart` also to start it again elsewhere."""
        handler = job_environment.SignalHandler(self, paths, submission)
        signal.signal(self._usr_sig(), handler.checkpoint_and_try_requeue)
        signal.signal(signal.SIGTERM, handler.checkpoint_and_exit)
        limit_s = float(os.environ.get("SUBMITIT_SHOAL_TIMEOUT_S", 0))
        if limit_s:
            signal.signal(signal.SIGALRM, handler.checkpoint_and_try_requeue)
            signal.setitimer(signal.ITIMER_REAL, limit_s)

    def _requeue(self, countdown: int) -> None:
        """The function has used its time and saved its state: start it again, on the same GPU."""
        logger.get_logger().info(f"Starting job {self.job_id} again ({countdown} remaining timeouts)")
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, sys.orig_argv)
