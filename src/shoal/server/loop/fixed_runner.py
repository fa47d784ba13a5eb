"""The runner of jobs that run any command at a fixed size: all workers start at once, with the usual variables.

A job with resize `restart` gives its GPUs back by ending, and starts again from its own checkpoint. A job with resize
`never` is suspended by signal and keeps its memory. A job with one GPU may also be on the GPU of another job,
co-located or pre-scheduled, if `sharing` says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from pathlib import Path

from shoal.executors.base import Exit
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.devices import Device
from shoal.server.loop.lifecycle import Verb, may
from shoal.server.loop.live_job import ACTIVE, LEAVING, SUSPENDED, LiveJob, LiveWorker
from shoal.server.loop.runner import RunnerBase, describe_exit

log = logging.getLogger("shoal.server")

#: A disk that is full may have room again by then.
RETRY_S = 1.0


class FixedRunner(RunnerBase):
    def reconcile(self, job: LiveJob) -> None:
        want = job.wanted
        place = None if want else self.parts.sharing.place(job)
        self.parts.unmet.discard(job.id)
        if job.ending is not None or job.life.state is JobState.STOPPING:
            return  # the exit of its last worker ends it
        if not job.workers:
            if want:
                self._begin(job, want)
            elif place is not None:
                self._begin_colocated(job, place)
        elif any(w.state == LEAVING for w in job.workers.values()):
            return
        elif place is not None:
            self._stay_colocated(job, place)
        elif not want:
            self._withdraw(job)
        elif job.colocated:
            self._own(job, want)
        elif all(w.state == SUSPENDED for w in job.workers.values()):
            self._wake(job, want)
        elif self._must_move(job, [w.device for w in job.workers.values()], want):
            self._withdraw(job)
            self.loop.soon(job)
        elif may(job.life, Verb.START):  # paused and resumed before it was suspended
            self._runs(job, list(job.workers.values()))

    def holds(self, job: LiveJob) -> None:
        """Also report the progress to the scheduler: a command reports none itself."""
        super().holds(job)
        self.parts.profiles.tell_length(job)

    def _begin(self, job: LiveJob, want: dict[int, int]) -> None:
        devices = self.parts.devices.choose(want, self.parts.sharing.beside(job))
        if devices is None:
            self.parts.unmet.add(job.id)
            return
        job.prescheduled = False
        self._begin_on(job, devices)
        self.parts.sharing.began(job)

    def _begin_on(self, job: LiveJob, devices: list[Device], *, colocated: bool = False) -> None:
        job.asked_to_end = False
        job.generation += 1
        if may(
            job.life, Verb.PREEMPT
        ):  # its processes were lost with a server that was killed before it recorded this
            self.advance(job, Verb.PREEMPT)
        workers = [
            self.new_worker(job, device, rank, colocated=colocated) for rank, device in enumerate(devices)
        ]
        if may(job.life, Verb.START) and not job.prescheduled:
            self.advance(job, Verb.START, gpus=job.gpus)
        port = str(free_port())
        local = Counter(d[0] for d in devices)
        seen: Counter[int] = Counter()
        for worker in workers:
            node = worker.device[0]
            env = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": str(worker.rank),
                "WORLD_SIZE": str(len(workers)),
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(local[node]),
                "SHOAL_ATTEMPT": str(job.life.restarts),
            }
            seen[node] += 1
            worker.state = ACTIVE
            self.parts.outbox.worker(worker.id, state=ACTIVE)
            self.start(
                job, worker, env | ({"SHOAL_GO": str(self._go(job, worker))} if job.prescheduled else {})
            )
        if not job.prescheduled:
            self.advance(job, Verb.RUN, gpus=job.gpus)

    def _withdraw(self, job: LiveJob) -> None:
        """Release its GPUs."""
        if job.resize is Resize.RESTART:
            self._stop_all(job)
            return
        if all(w.state == SUSPENDED for w in job.workers.values()):
            return
        for worker in job.workers.values():
            worker.state, worker.colocated = SUSPENDED, False
            self.parts.outbox.worker(worker.id, state=SUSPENDED)
            self.parts.outbox.effect(lambda w=worker: self._suspended(w))  # type: ignore[misc]
        job.colocated = False
        self.holds(job)
        if may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _must_move(self, job: LiveJob, devices: list[Device], want: dict[int, int]) -> bool:
        """Whether the job has to leave these GPUs for its target.

        A process that is only suspended keeps its memory on its real GPU and cannot move. It uses that GPU, even if
        its target is another one, unless the node is drained.
        """
        nodes = Counter(node for node, _ in devices)
        if nodes == want:
            return False
        return job.resize is Resize.RESTART or any(
            n in self.parts.drained or self.parts.nodes[n].virtual for n in nodes
        )

    def _suspended(self, worker: LiveWorker) -> None:
        self.parts.executor.suspend(worker.id)
        if worker.state == SUSPENDED:
            self.parts.devices.take_back(worker.device, worker.id, keep_warm=True)
            self.loop.gpus_freed()
            self.parts.sharing.look_again()

    def _wake(self, job: LiveJob, want: dict[int, int]) -> None:
        workers = sorted(job.workers.values(), key=lambda w: w.rank or 0)
        devices = [w.device for w in workers]
        if self._must_move(job, devices, want) or not all(self.parts.devices.is_free(d) for d in devices):
            # A suspended process cannot move from a real GPU to another. A virtual GPU is only a number.
            found = self.parts.devices.choose(want) if self.parts.nodes[devices[0][0]].virtual else None
            if found is None:
                self.parts.unmet.add(job.id)
                return
            devices = found
        for worker, device in zip(workers, devices):
            self._move(worker, device)
            self.parts.outbox.effect(lambda w=worker: self.parts.executor.wake(w.id))  # type: ignore[misc]
        self._runs(job, workers)

    def _move(self, worker: LiveWorker, device: Device, *, colocated: bool = False) -> None:
        """Move a worker to this GPU: as its owner or, if `colocated`, next to its owner."""
        self.parts.devices.take_back(worker.device, worker.id)
        worker.device, worker.state, worker.colocated = device, ACTIVE, colocated
        worker.node = self.parts.nodes[device[0]].name
        if colocated:
            self.parts.devices.colocate(device, worker.id)
        else:
            self.parts.devices.give(device, worker.id)
        self.parts.outbox.worker(worker.id, state=ACTIVE, gpu=device[1], node=worker.node)

    def _runs(self, job: LiveJob, workers: list[LiveWorker]) -> None:
        """Record that the job runs on the GPUs of these workers."""
        job.colocated = any(w.colocated for w in workers)
        self.holds(job)
        if may(job.life, Verb.START):
            self.advance(job, Verb.START, gpus=job.gpus)
            self.advance(job, Verb.RUN, gpus=job.gpus)
        for worker in workers if job.shared else ():
            self.parts.outbox.effect(lambda w=worker: self.say_go(job, w))  # type: ignore[misc]
        self.parts.sharing.began(job)

    # -- on a GPU of another job -------------------------------------------------------------------

    def _begin_colocated(self, job: LiveJob, device: Device) -> None:
        """Start it on a GPU that another job holds: a co-located job runs there, a pre-scheduled one prepares."""
        self._begin_on(job, [device], colocated=True)

    def _stay_colocated(self, job: LiveJob, device: Device) -> None:
        (worker,) = job.workers.values()
        if worker.colocated and worker.device == device:
            return
        was_suspended = worker.state == SUSPENDED
        self._move(worker, device, colocated=True)
        if was_suspended:
            self.parts.outbox.effect(lambda: self.parts.executor.wake(worker.id))
        if job.prescheduled:  # it continues to prepare, and may not use the GPU yet
            job.colocated = True
            self.holds(job)
            return
        self._runs(job, [worker])

    def _own(self, job: LiveJob, want: dict[int, int]) -> None:
        """A co-located job got a GPU of its own: the one it is on, if that has become free."""
        (worker,) = job.workers.values()
        device = worker.device
        if want != {device[0]: 1} or self.parts.devices.owner(device) is not None:
            virtual = self.parts.nodes[device[0]].virtual and sum(want.values()) == 1
            found = self.parts.devices.choose(want) if virtual else None
            if found is None and job.resize is Resize.RESTART and not virtual:
                self._stop_all(job)
                return
            if found is None:
                self.parts.unmet.add(job.id)
                return
            device = found[0]
        self._move(worker, device)
        job.host = None
        self._runs(job, [worker])
        text = f"it has a GPU of its own: GPU {device[1]} of {worker.node}"
        self.parts.outbox.event("job.owns", text, job, gpus=1, node=worker.node, gpu=device[1])

    def repeat_orders(self, job: LiveJob) -> None:
        for worker in job.workers.values():
            if worker.state == ACTIVE:
                self.parts.executor.wake(worker.id)  # does nothing to one that runs
                if job.shared and not (job.colocated and job.prescheduled):
                    self.say_go(job, worker)

    def _go(self, job: LiveJob, worker: LiveWorker) -> Path:
        return self.parts.worker_directory(job.id, worker.id) / "go"

    def say_go(self, job: LiveJob, worker: LiveWorker) -> None:
        """Tell a pre-scheduled worker that it may use the GPU now."""
        try:
            self._go(job, worker).touch()
        except FileNotFoundError:
            pass  # its directory is gone, and so is the process
        except OSError as error:
            log.warning("cannot tell worker %s to go on, trying again: %s", worker.id, error)
            asyncio.get_running_loop().call_later(RETRY_S, self._say_go_again, job, worker)

    def _say_go_again(self, job: LiveJob, worker: LiveWorker) -> None:
        if worker.id in job.workers and not self.loop.stopping:
            self.say_go(job, worker)

    def _stop_all(self, job: LiveJob) -> None:
        for worker in job.workers.values():
            self.stop(job, worker)

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        lost_in_a_crash = not exit_.began and exit_.code is None
        job.asked_to_end = job.asked_to_end or exit_.asked_to_end or lost_in_a_crash
        job.exit_code, job.signal = exit_.code, exit_.signal
        if lost_in_a_crash and job.ending is None:
            self._stop_all(job)
        elif not exit_.ok and not exit_.asked_to_end and worker.state != LEAVING and job.ending is None:
            job.ending = describe_exit(exit_)
            self._stop_all(job)
        if job.workers:
            return
        if job.ending is not None:
            self.conclude(job)
        elif job.asked_to_end and job.life.state is JobState.STOPPING:
            self.over(job, Verb.VANISH)
        elif job.asked_to_end:
            if may(job.life, Verb.PREEMPT):
                self.advance(job, Verb.PREEMPT, "its workers have ended; it begins again when it has GPUs")
            self.loop.soon(job)
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
    """A port that was free a moment ago, where the workers of a job rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
