"""`gpus: auto` in the live system: chosen by what earlier jobs showed, and a plain word where nothing is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .fakes import Here, run, server

TRAIN = ["python", "train.py", "--epochs=3"]


async def told(here: Here, job: dict[str, Any]) -> str:
    events = await here.get("/events", params={"job": job["id"], "type": "job.sized"})
    (event,) = events["items"]
    return str(event["message"])


def measured(here: Here, model: str, seconds: dict[int, float]) -> None:
    for gpus, step_s in seconds.items():
        here.loop.profiles.estimator(model).observe(gpus, 1, "virtual", step_s)


def finished(
    here: Here, user: str, gpus: int, running_s: float, command: list[str] = TRAIN, **more: Any
) -> None:
    """A job that has run before."""
    row = {
        "name": "old", "user": user, "state": "succeeded", "spec": {"command": command}, "given": [],
        "min_gpus": gpus, "max_gpus": gpus, "requested_gpus": gpus, "resize": "never", "model": "old",
        "submitted_s": 0.0, "settled_s": 0.0, "running_s": running_s, "gpu_s": gpus * running_s, **more,
    }  # fmt: skip
    with here.control.store.change(0.0, actor=user) as change:
        change.add_job(**row)


def test_where_nothing_is_known_it_says_so_and_may_have_anything(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            job = await here.submit("auto")
            assert (job["min_gpus"], job["max_gpus"], job["resize"]) == (1, 4, "live")
            why = await told(here, job)
            assert why.startswith("GPUs: unknown, because no job with this command has been measured; and ")
            assert why.endswith("; using 1..4")
            fixed = await here.submit("auto", resize="never")
            assert (fixed["min_gpus"], fixed["max_gpus"]) == (1, 1)
            assert (await told(here, fixed)).endswith("; using 1")

    run(story())


def test_speeds_of_the_same_model_word_tell_the_last_gpu_that_is_worth_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            measured(here, "net", {1: 1.0, 2: 0.52, 3: 0.45, 4: 0.43})
            job = await here.submit("auto", model="net")
            assert (job["min_gpus"], job["max_gpus"]) == (1, 2)
            assert "GPU 2 adds 0.92 of a GPU's worth and GPU 3 only 0.30" in await told(here, job)
            fixed = await here.submit("auto", model="net", resize="never")
            assert (fixed["min_gpus"], fixed["max_gpus"], fixed["resize"]) == (2, 2, "never")

    run(story())


def test_finished_jobs_of_the_owner_tell_it_and_those_of_others_do_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            await here.add_user("ada")
            await here.add_user("ben")
            for _ in range(8):
                for gpus in (1, 2, 4):
                    finished(here, "ada", gpus, 100.0 if gpus == 1 else 52.0)
                    finished(here, "ada", gpus, 10.0, command=["python", "other.py"])
                    finished(here, "ada", gpus, 10.0, resizes=1)
            job = await here.submit("auto", user="ada", command=TRAIN)
            assert job["max_gpus"] == 2
            assert "finished jobs like it" in await told(here, job)
            other = await here.submit("auto", user="ben", command=TRAIN)
            assert other["max_gpus"] == 4
            assert "there are none" in await told(here, other)

    run(story())


def test_a_plan_tells_what_would_be_chosen_and_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            measured(here, "net", {1: 1.0, 2: 0.52, 3: 0.45, 4: 0.43})
            spec = {"command": ["train"], "gpus": "auto", "workdir": "/tmp", "model": "net"}
            plan = await here.post("/plan", json={"spec": spec})
            assert plan["gpus"] == 2
            assert plan["sentence"].endswith("by speeds measured of the same command; using 1..2")
            assert (await here.get("/jobs"))["items"] == []

    run(story())


def test_the_same_key_gives_the_same_job_though_more_is_known_by_then(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            body = {"command": ["train"], "gpus": "auto", "workdir": "/tmp", "model": "net"}
            key = {"Idempotency-Key": "once"}
            first = await here.post("/jobs", json=body, headers=key, status=201)
            measured(here, "net", {1: 1.0, 2: 0.9, 3: 0.9, 4: 0.9})
            again = await here.post("/jobs", json=body, headers=key, status=200)
            assert (again["id"], again["max_gpus"]) == (first["id"], 4)

    run(story())


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"requested_gpus": 2}, "leave it out with gpus auto"),
        ({"gpus": "automatic"}, "not a number of GPUs"),
        ({"gpu_types": ["tpu"]}, "no node has GPUs of type"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_a_sentence(
    tmp_path: Path, more: dict[str, Any], word: str
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            body = {"command": ["train"], "gpus": "auto", "workdir": "/tmp", **more}
            answer = await here.post("/jobs", json=body, status=422)
            assert word in str(answer["error"])

    run(story())
