"""Crews of any command: all workers at once, at a fixed size, with the usual variables; paused by signal.

A job that may be restarted gives its GPUs back by ending, and begins again from its own checkpoint; one that may
not stands still meanwhile and keeps its memory.
"""

from __future__ import annotations

import socket
from collections import Counter

from shoal.executors.base import Exit
from shoal.server.crew import CrewBase, describe_exit, wanted
from shoal.server.lifecycle import Verb, may
from shoal.server.live_job import ACTIVE, LEAVING, STOPPED, LiveJob, LiveWorker
from shoal.server.models import JobState, Resize


class Gang(CrewBase):
    def reconcile(self, job: LiveJob) -> None:
        want = wanted(job)
        self.c.unmet.discard(job.id)
        if job.ending is not None or job.life.state is JobState.STOPPING:
            return  # the last exit brings it on
        if not job.workers:
            if want:
                self._begin(job, want)
        elif any(w.state == LEAVING for w in job.workers.values()):
            return
        elif not want:
            self._withdraw(job)
        elif all(w.state == STOPPED for w in job.workers.values()):
            self._wake(job, want)
        elif job.resize is Resize.RESTART and Counter(w.device[0] for w in job.workers.values()) != want:
            self._stop_all(job)

    def _begin(self, job: LiveJob, want: dict[int, int]) -> None:
        devices = self.c.devices.choose(want)
        if devices is None:
            self.c.unmet.add(job.id)
            return
        job.told = False
        job.generation += 1
        if may(job.life, Verb.PREEMPT):  # its processes were lost with a server that could not say so
            self.advance(job, Verb.PREEMPT)
        crew = [self.new_worker(job, device, rank) for rank, device in enumerate(devices)]
        if may(job.life, Verb.START):
            self.advance(job, Verb.START, gpus=len(crew))
        port = str(free_port())
        local = Counter(d[0] for d in devices)
        seen: Counter[int] = Counter()
        for worker in crew:
            node = worker.device[0]
            env = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": str(worker.rank),
                "WORLD_SIZE": str(len(crew)),
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(local[node]),
                "SHOAL_ATTEMPT": str(job.life.restarts),
            }
            seen[node] += 1
            worker.state = ACTIVE
            self.c.outbox.worker(worker.id, state=ACTIVE)
            self.start(job, worker, env)
        self.advance(job, Verb.RUN, gpus=len(crew))

    def _withdraw(self, job: LiveJob) -> None:
        """Let its GPUs go."""
        if job.resize is Resize.RESTART:
            self._stop_all(job)
            return
        if all(w.state == STOPPED for w in job.workers.values()):
            return
        for worker in job.workers.values():
            worker.state = STOPPED
            self.c.outbox.worker(worker.id, state=STOPPED)
            self.c.outbox.effect(lambda w=worker: self._suspended(w))  # type: ignore[misc]
        self.holds(job)
        if may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _suspended(self, worker: LiveWorker) -> None:
        self.c.executor.suspend(worker.id)
        if worker.state == STOPPED:
            self.c.devices.take_back(worker.device, worker.id, keep_warm=True)
            self.c.gpus_freed()

    def _wake(self, job: LiveJob, want: dict[int, int]) -> None:
        crew = sorted(job.workers.values(), key=lambda w: w.rank or 0)
        devices = [w.device for w in crew]
        if not all(self.c.devices.is_free(d) for d in devices):
            # What is on a real GPU cannot move to another. A virtual one is no more than a number.
            found = self.c.devices.choose(want) if self.c.nodes[devices[0][0]].virtual else None
            if found is None:
                self.c.unmet.add(job.id)
                return
            devices = found
        for worker, device in zip(crew, devices):
            self.c.devices.take_back(worker.device, worker.id)
            worker.device, worker.state = device, ACTIVE
            self.c.devices.give(device, worker.id)
            self.c.outbox.worker(worker.id, state=ACTIVE, gpu=device[1])
            self.c.outbox.effect(lambda w=worker: self.c.executor.wake(w.id))  # type: ignore[misc]
        self.holds(job)
        self.advance(job, Verb.START, gpus=len(crew))
        self.advance(job, Verb.RUN, gpus=len(crew))

    def _stop_all(self, job: LiveJob) -> None:
        for worker in job.workers.values():
            self.stop(job, worker)

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        lost_in_a_crash = not exit_.began and exit_.code is None
        job.told = job.told or exit_.told or lost_in_a_crash
        job.exit_code, job.signal = exit_.code, exit_.signal
        if lost_in_a_crash and job.ending is None:
            self._stop_all(job)
        elif not exit_.ok and not exit_.told and worker.state != LEAVING and job.ending is None:
            job.ending = describe_exit(exit_)
            self._stop_all(job)
        if job.workers:
            return
        if job.ending is not None:
            self.conclude(job)
        elif job.told and job.life.state is JobState.STOPPING:
            self.over(job, Verb.VANISH)
        elif job.told:
            if may(job.life, Verb.PREEMPT):
                self.advance(job, Verb.PREEMPT, "its workers have ended; it begins again when it has GPUs")
            self.c.soon(job)
        else:
            self.over(job, Verb.SUCCEED)

    def shut_down(self, job: LiveJob) -> None:
        self._stop_all(job)
        if may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT, "the server was shut down; it begins again")

    def cancel(self, job: LiveJob) -> None:
        self._stop_all(job)
        if not job.workers:
            self.over(job, Verb.VANISH)


def free_port() -> int:
    """A port that was free a moment ago, for the gang to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
