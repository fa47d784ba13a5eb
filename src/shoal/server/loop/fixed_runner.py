"""The runner of jobs that run any command at a fixed size: all workers start at once, with the usual variables.

A job with resize `restart` gives its GPUs back by ending, and starts again from its own checkpoint. A job with resize
`never` is suspended by signal and keeps its memory. A job with one GPU may also be on the GPU of another job,
co-located or pre-scheduled, if `sharing` says so.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from shoal.executors.base import Exit
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.devices import Device
from shoal.server.loop.lifecycle import Verb, may
from shoal.server.loop.live_job import ACTIVE, LEAVING, SUSPENDED, LiveJob, LiveWorker
from shoal.server.loop.processes import divided, environment
from shoal.server.loop.restarts import Cause, rests_until_s
from shoal.server.loop.runner import RunnerBase, describe_exit


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
            if not self._stays_until_the_end(job):
                self._withdraw(job)
        elif job.colocated:
            self._own(job, want)
        elif all(w.state == SUSPENDED for w in job.workers.values()):
            self._wake(job, want)
        elif self._must_move(job, [d for w in job.workers.values() for d in w.devices], want):
            self._move_or_rest(job, want)
        elif may(job.life, Verb.START):  # paused and resumed before it was suspended
            self._runs(job, list(job.workers.values()))

    def holds(self, job: LiveJob) -> None:
        """Also report the progress to the scheduler: a command reports none itself."""
        super().holds(job)
        self.parts.profiles.tell_length(job)

    def _begin(self, job: LiveJob, want: dict[int, int]) -> None:
        devices = self.choose(job, want)
        if devices is None:
            self.parts.unmet.add(job.id)
            return
        job.prescheduled = False
        self._begin_on(job, devices)
        self.parts.sharing.process_began(job)

    def _begin_on(self, job: LiveJob, devices: list[Device], *, colocated: bool = False) -> None:
        job.asked_to_end = False
        job.generation += 1
        job.began_s, job.size = self.loop.now_s(), len(devices)
        # its processes were lost with a server that was killed before it recorded this
        if may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)
        per_gpu = job.spec.get("per_gpu", True)  # older jobs have one process per GPU
        groups = divided(devices, per_gpu=per_gpu)
        workers = [
            self.new_worker(job, mine[0], rank, more=mine[1:], colocated=colocated)
            for rank, mine in enumerate(groups)
        ]
        if may(job.life, Verb.START) and not job.prescheduled:
            self.advance(job, Verb.START, gpus=job.gpus)
        first = self.parts.nodes[devices[0][0]]
        port = self.parts.executor.free_port(first.name)
        for rank, worker in enumerate(workers):
            env = environment(groups, rank, per_gpu=per_gpu, address=first.address, port=port)
            worker.state = ACTIVE
            self.parts.outbox.worker(worker.id, state=ACTIVE)
            # Every process of a node sees all GPUs of the gang there, so that `cuda:LOCAL_RANK` is a rank's own.
            self.start(
                job, worker, env | {"SHOAL_ATTEMPT": str(job.life.restarts)},
                gpus=tuple(gpu for node, gpu in devices if node == worker.device[0]),
                waits_for_go=job.prescheduled, port=port if rank == 0 else None,
            )  # fmt: skip
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

    def _stays_until_the_end(self, job: LiveJob) -> bool:
        """Its processes cannot move, and their machine will be taken away: suspended they would only lose time."""
        return (
            job.resize is Resize.NEVER
            and job.life.state is JobState.RUNNING
            and any(w.device[0] in self.parts.leaving for w in job.workers.values())
        )

    def _move_or_rest(self, job: LiveJob, want: dict[int, int]) -> None:
        now_s = self.loop.now_s()
        rests_s = rests_until_s(job, want, now_s)
        if rests_s is not None:
            asyncio.get_running_loop().call_later(rests_s - now_s, self._rested, job.id)
            return
        self._withdraw(job)
        self.loop.soon(job)

    def _rested(self, job_id: int) -> None:
        if job_id in self.parts.jobs and not self.loop.stopping:
            self.loop.soon(self.parts.jobs[job_id])

    def _must_move(self, job: LiveJob, devices: list[Device], want: dict[int, int]) -> bool:
        """Whether the job has to leave these GPUs for its target.

        A process that is only suspended keeps its memory on its node and cannot move. It uses its GPU, even if
        its target is another one, unless the node is out of use.
        """
        nodes = Counter(node for node, _ in devices)
        if nodes == want:
            return False
        return job.resize is Resize.RESTART or any(n in self.parts.out_of_use for n in nodes)

    def _suspended(self, worker: LiveWorker) -> None:
        self.parts.executor.suspend(worker.id)
        if worker.state == SUSPENDED:
            for device in worker.devices:
                self.parts.devices.take_back(device, worker.id, keep_warm=True)
            self.loop.gpus_freed()
            self.parts.sharing.process_left()

    def _wake(self, job: LiveJob, want: dict[int, int]) -> None:
        workers = sorted(job.workers.values(), key=lambda w: w.rank or 0)
        devices = [device for w in workers for device in w.devices]
        if self._must_move(job, devices, want) or not self.parts.ceilings.allow(job, want):
            # Until its node is back: the processes cannot move to another. Or until its limits allow it.
            self.parts.unmet.add(job.id)
            return
        if not all(self.parts.devices.is_free(d) for d in devices):
            found = self._others_on_same_nodes(devices)
            if found is None:
                self.parts.unmet.add(job.id)
                return
            devices = found
        rest = iter(devices)
        for worker in workers:
            self._move(worker, *(next(rest) for _ in worker.devices))
            self.parts.outbox.effect(lambda w=worker: self.parts.executor.wake(w.id))  # type: ignore[misc]
        self._runs(job, workers)

    def _others_on_same_nodes(self, devices: list[Device]) -> list[Device] | None:
        """Free GPUs for suspended processes, on the node of each. None if there are none.

        A process cannot move from a real GPU to another. A virtual GPU is only a number.
        """
        if not all(self.parts.nodes[node].virtual for node, _ in devices):
            return None
        found = self.parts.devices.choose(Counter(node for node, _ in devices))
        if found is None:
            return None
        free = sorted(found, reverse=True)
        return [free.pop(next(i for i, d in enumerate(free) if d[0] == node)) for node, _ in devices]

    def _move(self, worker: LiveWorker, device: Device, *more: Device, colocated: bool = False) -> None:
        """Move a worker to these GPUs: as their owner or, if `colocated`, next to the owner of the one."""
        for held in worker.devices:
            self.parts.devices.take_back(held, worker.id)
        worker.device, worker.more_gpus = device, tuple(gpu for _, gpu in more)
        worker.state, worker.colocated = ACTIVE, colocated
        worker.node = self.parts.nodes[device[0]].name
        if colocated:
            self.parts.devices.colocate(device, worker.id)
        else:
            for held in worker.devices:
                self.parts.devices.give(held, worker.id)
        self.parts.outbox.worker(
            worker.id, state=ACTIVE, gpu=device[1], more_gpus=list(worker.more_gpus), node=worker.node
        )

    def _runs(self, job: LiveJob, workers: list[LiveWorker]) -> None:
        """Record that the job runs on the GPUs of these workers."""
        job.colocated = any(w.colocated for w in workers)
        self.holds(job)
        if may(job.life, Verb.START):
            self.advance(job, Verb.START, gpus=job.gpus)
            self.advance(job, Verb.RUN, gpus=job.gpus)
        for worker in workers if job.shared else ():
            self.parts.outbox.effect(lambda w=worker: self.parts.executor.go(w.id))  # type: ignore[misc]
        self.parts.sharing.process_began(job)

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
        if not self.parts.ceilings.allow(job, want):
            self.parts.unmet.add(job.id)
            return
        if want != {device[0]: 1} or self.parts.devices.owner(device) is not None:
            virtual = self.parts.nodes[device[0]].virtual and want == {device[0]: 1}
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
                    self.parts.executor.go(worker.id)

    def _stop_all(self, job: LiveJob) -> None:
        for worker in job.workers.values():
            self.stop(job, worker)

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        # A job that saves its own checkpoints begins again on another machine. That is no failure of its command.
        lost_with_node = exit_.node_lost and job.resize is Resize.RESTART
        not_begun = not exit_.began and exit_.code is None
        # Nobody may know that it was told to end: its keeper was killed, or its command failed just before.
        ended_as_told = exit_.asked_to_end or (worker.state == LEAVING and not exit_.ok)
        job.asked_to_end = job.asked_to_end or ended_as_told or not_begun or lost_with_node
        job.exit_code, job.signal = exit_.code, exit_.signal
        if not_begun and job.ending is None:
            if not exit_.asked_to_end and job.again_s is None and job.life.state is not JobState.STOPPING:
                why = describe_exit(exit_)
                job.ending = None if self.start_again(job, Cause.UNBEGUN, why) else why
            self._stop_all(job)
        elif lost_with_node and job.ending is None:
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
