"""The profile of a job that is over: what is on record of its speed."""

from __future__ import annotations

from collections.abc import Callable

from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.server.api import models as m
from shoal.server.loop.learning import Learner
from shoal.server.services.why import ref_of


class PastProfiles:
    def __init__(self, speed_of: Callable[[str], SpeedEstimator]) -> None:
        """`speed_of`: what jobs with this model word taught of their speed."""
        self._speed_of = speed_of

    def show(self, job: m.Job) -> m.Profile:
        points: list[m.SpeedPoint] = []
        basis = "its size was fixed, so its speed at other sizes was not measured"
        if job.resize is not m.Resize.NEVER:
            speed = self._speed_of(job.model)
            measured = speed.gpu_types()
            basis = "nothing was measured"
            if measured:
                learner = Learner(
                    speed=speed,
                    min_gpus=job.min_gpus,
                    max_gpus=job.max_gpus,
                    iterations=None,
                    expected_s=None,
                    requested_gpus=job.requested_gpus,
                    target_loss=None,
                )
                points = learner.points(job.gpu_type if job.gpu_type in measured else measured[0])
                basis = f"measured on {', '.join(measured)}, by this job and others of its model"
        return m.Profile(
            job=ref_of(job),
            basis=basis,
            points=points,
            remaining=m.Estimate(unknown="the job is over"),
            next_measurement="nothing: the job is over",
        )
