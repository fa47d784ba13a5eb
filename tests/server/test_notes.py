"""What the runtime in the workers says reaches the job's owner: notes, and where a script stopped early."""

from __future__ import annotations

from pathlib import Path

from shoal.server.loop.coordinator_events import MAX_NOTES
from shoal.wire.messages import Report

from .fakes import run, server


def test_notes_become_events_and_a_job_that_stopped_early_says_where(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("2..2", resize="live"))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
            first, second = here.fleet.crew(job)
            first.send(Report(step=5, notes=("global batch 20 with 2 workers",)))
            second.send(Report(step=5, notes=("again",) * (2 * MAX_NOTES)))

            def notes() -> list[str]:
                found = here.control.store.events(job=job, type="worker.note", limit=1000)
                return [event["message"] for event in found]

            await here.until(lambda: len(notes()) >= MAX_NOTES)
            assert len(notes()) == MAX_NOTES, "no job fills the store with notes"
            assert "global batch 20 with 2 workers" in notes()
            for worker in (first, second):
                worker.member.finish("it stopped in epoch 2 of 4, after 15 steps")
                worker.say()
                here.fleet.end(worker.id, 0)
            await here.until(lambda: here.state(job) == "succeeded")
            shown = await here.get(f"/jobs/{job}")
            assert shown["message"] == "it stopped in epoch 2 of 4, after 15 steps"

    run(story())
