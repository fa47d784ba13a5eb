"""What is measured on clusters with several GPU types."""

from __future__ import annotations

from pathlib import Path

from shoal.executors.base import NodeInfo

from .fakes import Fleet, run, server

TYPES = (NodeInfo("f", 1, "fast", True), NodeInfo("s", 1, "slow", True))


def test_steps_count_for_the_type_they_ran_on_and_an_unknown_speed_is_not_given_as_measured(
    tmp_path: Path,
) -> None:
    """Until a job has switched to GPUs of another type, it trains on those that it had."""

    async def story() -> None:
        async with server(tmp_path, fleet=Fleet(TYPES)) as here:
            job = here.loop.jobs[(await here.submit("1", resize="live", gpu_types=["fast"]))["id"]]
            learner = here.loop.profiles.learner(job)
            await here.until(lambda: learner.is_measured(1, "fast"), train=(job.id,))
            view = here.loop.scheduler.view
            here.loop.profiles.tell_length(job)
            assert view.rate[view.row(job.id)] > 0
            job.gpu_type = "slow"  # its target, while its worker trains on
            before = learner.speed.samples(1, "fast")
            await here.until(lambda: learner.speed.samples(1, "fast") > before, train=(job.id,))
            assert not learner.is_measured(1, "slow")
            here.loop.profiles.tell_length(job)
            assert view.rate[view.row(job.id)] == 0, "policies would take the speed of the other type for it"

    run(story())
