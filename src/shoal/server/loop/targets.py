"""The one place that turns the scheduler's commands into the targets of the live jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.plan import CauseKind, Plan, Reconfigure
from shoal.core.words import counted
from shoal.executors.base import NodeInfo
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox
from shoal.server.metrics import Metrics

#: Per plan: jobs that gained GPUs named to a job that lost some, and losing jobs that get a full reason.
MOST_NAMED, MOST_EXPLAINED = 5, 50

#: The reason why a job lacks GPUs, as plain data; None if it lacks none.
Explain = Callable[[LiveJob], dict[str, Any] | None]


class Targets:
    """Writes `LiveJob.target`. Nobody else does."""

    def __init__(
        self,
        jobs: Mapping[int, LiveJob],
        outbox: Outbox,
        metrics: Metrics,
        nodes: Sequence[NodeInfo],
        explain: Explain,
    ) -> None:
        self._jobs, self._outbox, self._metrics, self._nodes = jobs, outbox, metrics, nodes
        self._explain = explain

    def apply(self, plan: Plan, policy: str, causes: list[dict[str, Any]]) -> list[int]:
        """Set the targets that the plan commands and record why. Returns the jobs whose target changed.

        `causes` are the events of the cycle, see `causes_of`.
        """
        moves = [
            (job, command, sum(job.target.values()))
            for command in plan.commands
            if (job := self._jobs.get(command.job)) is not None and not job.is_over
        ]
        gains = sorted((before - command.share.gpus, job.id, job) for job, command, before in moves)
        winners = [job for loss, _, job in gains if loss < 0]
        explained = 0
        for job, command, before in moves:
            gpus = command.share.gpus
            data: dict[str, Any] = {"verb": command.verb, "from_gpus": before, "to_gpus": gpus}
            data |= self._cause(command) | {"causes": causes}
            if gpus < before and winners and command.cause.kind is CauseKind.DECIDED:
                data |= {"policy": policy, "by": [w.id for w in winners[:MOST_NAMED]]}
                if explained < MOST_EXPLAINED:
                    explained += 1
                    data["reason"] = self._explain(job)
                self._metrics.preempted(winners[0].user, job.user, command.verb)
            self._set(job, command)
            why = self._why(command, job)
            self._outbox.event("job.target", f"{why}: {before} -> {counted(gpus, 'GPU')}", job, **data)
            self._metrics.resized(command.verb)
        return [job.id for job, _, _ in moves]

    def _set(self, job: LiveJob, command: Reconfigure) -> None:
        gpus = command.share.gpus
        # A pool has no placements: its only node is the first.
        job.target = dict(command.placement) or ({0: gpus} if gpus else {})
        job.gpu_type = command.share.gpu_type if gpus else job.gpu_type
        job.plan = command.plan
        self._outbox.job(job)

    def _cause(self, command: Reconfigure) -> dict[str, Any]:
        cause = command.cause
        if cause.kind is CauseKind.DECIDED:
            return {}
        node = {} if cause.node is None else {"node": self._name(cause.node)}
        return {"cause": cause.kind.value, **node}

    def _why(self, command: Reconfigure, job: LiveJob) -> str:
        """The first words of the event's message."""
        cause = command.cause
        if cause.kind is CauseKind.NODE_LOST:
            return "its GPUs are gone" if cause.node is None else f"{self._name(cause.node)} is out of use"
        if cause.kind is CauseKind.HELD:
            return "held by its owner" if job.again_s is None else "it failed and rests"
        if cause.kind is CauseKind.MEASURING:
            return f"{command.verb} for a measurement"
        return command.verb

    def _name(self, node: int) -> str:
        return self._nodes[node].name if 0 <= node < len(self._nodes) else f"node {node}"
