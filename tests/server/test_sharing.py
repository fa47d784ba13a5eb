"""Jobs on GPUs of others in the live system: guests and early starts, with fake workers and with real ones."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shoal.executors.base import NodeInfo, WorkerSpec

from .fakes import Fleet, Here, run, server
from .test_crash import RealServer

GPU_MB = 16_384.0
LIGHT = {"gpu_mem_mb": 4000, "gpu_util": 40}
QUICK = {"gpu_mem_mb": 4000, "pre_s": 20}


class Shared(Fleet):
    """GPUs on which several may be at work, as long as what they said they need fits."""

    def _check_gpu_is_free(self, worker: WorkerSpec) -> None:
        at_work = [
            other
            for other in self.running.values()
            if self.gpu(other) == self.gpu(worker) and other.worker not in {*self.suspended, worker.worker}
        ]
        if at_work:
            needs = [float(w.env.get("SHOAL_GPU_MEM_MB", "inf")) for w in (worker, *at_work)]
            assert sum(needs) < GPU_MB, f"{worker.worker} beside {[w.worker for w in at_work]}: {needs}"

    def at_work(self) -> dict[tuple[str, int], list[str]]:
        found = defaultdict(list)
        for worker in self.running.values():
            if worker.worker not in self.suspended:
                found[self.gpu(worker)].append(worker.worker)
        return dict(found)


async def host_and_guest(here: Here, **guest: Any) -> tuple[int, int]:
    host = (await here.submit("1", needs=LIGHT, name="host"))["id"]
    await here.until(lambda: here.state(host) == "running")
    other = (await here.submit("1", **({"needs": LIGHT, "name": "guest"} | guest)))["id"]
    await here.until(lambda: here.state(other) == "running")
    return host, other


def events_of(here: Here, job: int) -> list[str]:
    return [e["type"] for e in here.control.store.events(job=job, limit=1000)]


# -- guests ----------------------------------------------------------------------------------------


def test_a_guest_runs_beside_its_host_counts_no_gpu_and_inherits_it_without_a_stop(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True) as here:
            host, guest = await host_and_guest(here)
            assert fleet.at_work() == {("local", 0): [f"{host}.0", f"{guest}.0"]}
            found = await here.get(f"/jobs/{guest}")
            assert (found["gpus"], found["placement"], found["guest_of"]) == (0, [], host)
            assert found["workers"][0]["gpu"] == 0
            why = await here.get(f"/jobs/{guest}/why")
            assert re.search(
                "guest is running: it runs co-located on GPU 0 of local, beside host, and waits for a GPU "
                "of its own: ",
                why["sentence"],
            )
            told = why["reason"]["evidence"]
            assert told["host"] == host
            assert told["utilisation"] == pytest.approx(0.8)
            assert (told["max_utilisation"], told["gpu_mem_mb"]) == (1.3, 4000)
            assert told["needs_by"] == "what its owner gave"
            assert (await here.get(f"/jobs/{host}/why"))["sentence"].endswith(
                "1 GPU, which it shares with guest"
            )
            # One GPU is one GPU, whoever counts.
            assert (await here.get("/status"))["used_gpus"] == 1
            share = (await here.get("/shares"))["items"][0]
            assert (share["gpus"], share["running_jobs"], share["pending_jobs"]) == (1, 2, 0)
            metrics = await here.get("/metrics")
            assert 'shoal_gpus{state="allocated",type="virtual",user="admin"} 1' in metrics
            assert 'shoal_guest_jobs{as="guest",user="admin"} 1' in metrics
            assert here.loop.live_ledger.ledger.rate[0, :, 1].sum() == 1.0
            # Its host ends: the policy gives it the GPU, and it is there already.
            fleet.end(f"{host}.0")
            await here.until(lambda: here.gpus(guest) == 1)
            assert (fleet.told, fleet.suspended, fleet.started) == ([], set(), [f"{host}.0", f"{guest}.0"])
            found = await here.get(f"/jobs/{guest}")
            assert (found["guest_of"], found["state"], found["reason"]) == (None, "running", None)
            assert found["gpu_s"] < found["running_s"]
            fleet.end(f"{guest}.0")
            await here.until(lambda: here.state(guest) == "succeeded")
            told = [t for t in events_of(here, guest) if t.startswith("job.")]
            assert told == ["job.submitted", "job.guest", "job.started", "job.running", "job.target", "job.owns",
                            "job.succeeded"]  # fmt: skip

    run(story())


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (None, "its memory and utilisation are not known"),
        ({"gpu_mem_mb": 4000}, "its memory and utilisation are not known"),
        ({"gpu_mem_mb": 13_000, "gpu_util": 10}, "no GPU in use has 13000 MB"),
        ({"gpu_mem_mb": 100, "gpu_util": 95}, "95% of utilisation to spare below 130%"),
    ],
)
def test_who_does_not_fit_or_is_not_known_waits_and_why_says_so(
    tmp_path: Path, needs: dict[str, float] | None, why: str
) -> None:
    async def story() -> None:
        async with server(tmp_path, fleet=Shared(1), share=True) as here:
            host = (await here.submit("1", needs=LIGHT))["id"]
            await here.until(lambda: here.state(host) == "running")
            waits = (await here.submit("1", needs=needs))["id"]
            await here.until(lambda: waits in here.loop.scheduler.jobs)
            found = await here.get(f"/jobs/{waits}/why")
            assert found["job"]["state"] == "pending"
            assert why in found["reason"]["evidence"]["sharing"]

    run(story())


def test_without_the_option_nothing_is_shared(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            first = (await here.submit("1", needs=LIGHT | QUICK, expected_s=1))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("1", needs=LIGHT | QUICK))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            assert here.state(second) == "pending"
            status = await here.get("/status")
            assert (status["share"], status["pre_schedule"]) == (False, False)

    run(story())


@pytest.mark.parametrize("resize", ["never", "restart"])
def test_a_guest_makes_way_before_another_begins_on_the_gpu_of_its_host(tmp_path: Path, resize: str) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True) as here:
            host = (await here.submit("1", needs=LIGHT))["id"]
            await here.until(lambda: here.state(host) == "running")
            first = (await here.submit("1"))["id"]  # of unknown needs, so it waits, but is next
            guest = (await here.submit("1", needs=LIGHT, resize=resize))["id"]
            await here.until(lambda: here.state(guest) == "running")
            fleet.stubborn = True
            fleet.end(f"{host}.0")
            if resize == "restart":
                await here.until(lambda: f"{guest}.0" in fleet.told)
                assert f"{first}.0" not in fleet.started, "not while someone is there"
                reason = (await here.get(f"/jobs/{first}"))["reason"]
                assert reason["code"] == "WaitingForRelease"
                fleet._ended(f"{guest}.0", None, "SIGTERM", told=True)
            await here.until(lambda: here.state(first) == "running")
            assert fleet.at_work() == {("local", 0): [f"{first}.0"]}
            if resize == "never":
                assert fleet.suspended == {f"{guest}.0"}
                assert (await here.get(f"/jobs/{guest}"))["state"] == "pending"
                fleet.end(f"{first}.0")
                await here.until(lambda: here.gpus(guest) == 1)
                assert fleet.at_work() == {("local", 0): [f"{guest}.0"]}
                assert fleet.started.count(f"{guest}.0") == 1

    run(story())


def test_the_next_owner_may_be_host_again_and_several_share_one_gpu(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True) as here:
            jobs = [(await here.submit("1", needs=LIGHT))["id"] for _ in range(4)]
            await here.until(lambda: len(fleet.running) == 3)  # 4 x 40 % is above 130 %
            assert [here.state(j) for j in jobs] == ["running"] * 3 + ["pending"]
            fleet.end(f"{jobs[0]}.0")
            await here.until(lambda: here.gpus(jobs[1]) == 1 and here.state(jobs[3]) == "running")
            assert fleet.told == []
            assert [here.loop.jobs[j].host for j in jobs[1:]] == [None, jobs[1], jobs[1]]
            here.check()

    run(story())


@pytest.mark.parametrize("what", ["pause", "cancel"])
def test_a_guest_can_be_paused_and_cancelled_and_its_host_does_not_notice(tmp_path: Path, what: str) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True) as here:
            host, guest = await host_and_guest(here)
            await here.post(f"/jobs/{guest}/{what}")
            if what == "pause":
                await here.until(lambda: fleet.suspended == {f"{guest}.0"})
                assert here.state(guest) == "paused"
                await here.post(f"/jobs/{guest}/resume")
                await here.until(lambda: here.state(guest) == "running" and not fleet.suspended)
                assert here.loop.jobs[guest].host == host
            else:
                await here.until(lambda: here.state(guest) == "cancelled")
            assert here.gpus(host) == 1
            assert fleet.at_work()["local", 0][0] == f"{host}.0"

    run(story())


def test_a_host_that_fails_leaves_its_gpu_to_its_guest_and_begins_again_beside_it(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True) as here:
            host = (await here.submit("1", needs=LIGHT, max_restarts=1))["id"]
            await here.until(lambda: here.state(host) == "running")
            guest = (await here.submit("1", needs=LIGHT))["id"]
            await here.until(lambda: here.state(guest) == "running")
            fleet.end(f"{host}.0", 1)
            await here.until(lambda: f"{host}.1" in fleet.running)
            assert sorted(fleet.at_work()["local", 0]) == [f"{host}.1", f"{guest}.0"]
            assert (here.gpus(host), here.gpus(guest)) == (0, 1)
            assert fleet.told == []
            fleet.end(f"{guest}.0", 1)
            await here.until(lambda: here.state(guest) == "failed")
            await here.until(lambda: here.gpus(host) == 1)

    run(story())


def test_on_real_gpus_a_guest_stays_where_its_memory_is_until_that_gpu_is_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        node = NodeInfo("local", 2, "v100", False, ("a", "b"))
        fleet = Shared((node,))
        async with server(tmp_path, fleet=fleet, share=True) as here:
            host = (await here.submit("1", needs=LIGHT))["id"]
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(other) == "running")
            guest = (await here.submit("1", needs=LIGHT))["id"]
            again = (await here.submit("1", needs=LIGHT, resize="restart"))["id"]
            await here.until(lambda: here.state(again) == "running")
            fleet.end(f"{other}.0")
            await here.until(lambda: here.loop.jobs[guest].target_gpus == 1)
            assert sorted(fleet.at_work()) == [("local", 0)], "no one moves from GPU to GPU"
            why = (await here.get(f"/jobs/{guest}/why"))["reason"]
            assert why["code"] == "WaitingForRelease"
            assert "stays co-located until that GPU is free" in why["sentence"]
            late = (await here.submit("1", needs=LIGHT))["id"]
            await here.until(lambda: late in here.loop.scheduler.jobs)
            assert here.state(late) == "pending", (
                "the room that is taken counts though its guest is due elsewhere"
            )
            fleet.end(f"{host}.0")
            await here.until(lambda: here.gpus(guest) == 1 and here.gpus(again) == 1)
            at_work = fleet.at_work()
            assert at_work["local", 0] == [f"{guest}.0", f"{late}.0"]
            assert at_work["local", 1] == [f"{again}.1"], "one that may restart began anew on its own"

    run(story())


def test_a_live_job_can_be_host_and_what_it_does_meanwhile_teaches_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True, policy="max-min") as here:
            live = (await here.submit("1..2", needs=LIGHT, model="m"))["id"]
            await here.until(lambda: here.state(live) == "running")
            await here.until(lambda: here.loop.profiles.estimator("m").gpu_types(), train=(live,))
            guest = (await here.submit("1", needs=LIGHT))["id"]
            await here.until(lambda: here.state(guest) == "running", train=(live,))
            before = here.loop.profiles.estimator("m").to_dict()
            step = here.loop.jobs[live].progress.step
            await here.until(lambda: here.loop.jobs[live].progress.step > step + 50, train=(live,))
            assert here.loop.profiles.estimator("m").to_dict() == before
            waits = (await here.submit("1..2", needs=LIGHT))["id"]
            await here.until(lambda: waits in here.loop.scheduler.jobs)
            why = (await here.get(f"/jobs/{waits}/why"))["reason"]["evidence"]["sharing"]
            assert why == "a job that resizes while it trains cannot be co-located"

    run(story())


# -- early starts ----------------------------------------------------------------------------------


def test_the_next_job_prepares_where_one_ends_soon_and_then_has_the_gpu_and_is_let_in(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, pre_schedule=True) as here:
            first = (await here.submit("1", needs=LIGHT, expected_s=35.3, name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("1", needs=QUICK, name="second"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            assert fleet.started == [f"{first}.0"], "20 s to prepare and 15 s more are less than what is left"
            await here.until(lambda: f"{second}.0" in fleet.running)
            left_s = here.loop.profiles.left_s(here.loop.jobs[first])
            assert 34 < left_s <= 35
            assert fleet.running[f"{second}.0"].waits_for_go
            found = await here.get(f"/jobs/{second}")
            assert (found["state"], found["gpus"], found["guest_of"]) == ("pending", 0, first)
            assert "it prepares on GPU 0 of local, where first is about to end" in found["reason"]["sentence"]
            assert found["reason"]["evidence"]["host_ends_in_s"] == pytest.approx(35, abs=1)
            assert 'shoal_guest_jobs{as="preparing",user="admin"} 1' in await here.get("/metrics")
            assert not fleet.gone_on
            fleet.end(f"{first}.0")
            await here.until(lambda: here.state(second) == "running")
            assert fleet.gone_on == {f"{second}.0"}
            assert (here.gpus(second), fleet.started, fleet.told) == (1, [f"{first}.0", f"{second}.0"], [])
            told = [t for t in events_of(here, second) if t.startswith("job.")]
            assert told == [
                "job.submitted",
                "job.early",
                "job.target",
                "job.started",
                "job.running",
                "job.owns",
            ]

    run(story())


@pytest.mark.parametrize(
    ("host", "next_"),
    [
        ({"needs": LIGHT}, {"needs": QUICK}),  # when it ends is not known
        ({"needs": LIGHT, "expected_s": 5}, {"needs": {"gpu_mem_mb": 4000}}),  # how long to prepare is not
        ({"expected_s": 5}, {"needs": QUICK}),  # nor its memory
        (
            {"needs": LIGHT, "expected_s": 5},
            {"needs": {"pre_s": 20, "gpu_mem_mb": 13_000}},
        ),  # which is too much
        ({"needs": LIGHT, "expected_s": 5000}, {"needs": QUICK}),  # or it is far too soon
    ],
)
def test_who_cannot_prepare_beside_the_other_waits(
    tmp_path: Path, host: dict[str, Any], next_: dict[str, Any]
) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, pre_schedule=True) as here:
            first = (await here.submit("1", **host))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("1", **next_))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            for _ in range(10):
                await asyncio.sleep(0)
            assert fleet.started == [f"{first}.0"]

    run(story())


def test_if_another_gets_the_gpu_the_one_that_prepared_stands_still_and_goes_on_later(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, pre_schedule=True) as here:
            first = (await here.submit("1", needs=LIGHT, expected_s=5))["id"]
            await here.until(lambda: here.state(first) == "running")
            next_ = (await here.submit("1"))["id"]  # how long it prepares is not known, but it is its turn
            prepares = (await here.submit("1", needs=QUICK))["id"]
            await here.until(lambda: f"{prepares}.0" in fleet.running)
            fleet.end(f"{first}.0")
            await here.until(lambda: here.state(next_) == "running")
            assert fleet.suspended == {f"{prepares}.0"}
            assert not fleet.gone_on
            fleet.end(f"{next_}.0")
            await here.until(lambda: here.state(prepares) == "running")
            assert fleet.suspended == set()
            assert fleet.gone_on == {f"{prepares}.0"}

    run(story())


# -- crashes ---------------------------------------------------------------------------------------


def test_another_server_goes_on_with_guests_and_takes_them_away_only_if_told_to(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Shared(1)
        async with server(tmp_path, fleet=fleet, share=True, pre_schedule=True, kill=True) as here:
            host, guest = await host_and_guest(here)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            await here.until(lambda: here.loop.sharing.colocation.host_of == {guest: host})
            assert (await here.get("/status"))["share"], "what was asked for is remembered"
            assert (here.state(guest), here.gpus(guest), here.gpus(host)) == ("running", 0, 1)
            assert (fleet.started, fleet.told, fleet.suspended) == ([f"{host}.0", f"{guest}.0"], [], set())
            assert (await here.get(f"/jobs/{guest}"))["needs"]["gpu_util"] == 40
        async with server(tmp_path, fleet=fleet, share=False) as here:
            await here.until(lambda: fleet.suspended == {f"{guest}.0"})
            assert here.state(guest) == "pending"
            fleet.end(f"{host}.0")
            await here.until(lambda: here.gpus(guest) == 1)

    run(story())


@pytest.mark.parametrize("seed", [*range(5), 30])
def test_killed_at_random_moments_while_gpus_are_shared_it_loses_nothing_and_ends_clean(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    fleet = Shared((NodeInfo("local", 3, "v100", False, ("a", "b", "c")),))
    made: list[int] = []

    async def doings(here: Here) -> None:
        for _ in range(rng.randint(4, 16)):
            here.check()
            live = list(here.loop.jobs.values())
            job = rng.choice(live) if live else None
            what = rng.choice(
                ["submit", "submit", "submit", "step", "end", "end", "cancel", "pause", "resume"]
            )
            if what == "submit":
                needs = {"gpu_mem_mb": rng.choice([3000, 9000]), "gpu_util": rng.choice([20, 60])}
                spec = {
                    "needs": needs | rng.choice([{}, {"pre_s": 5}]) if rng.random() < 0.8 else None,
                    "resize": rng.choice([None, "restart"]),
                    "expected_s": rng.choice([None, 5.0, 500.0]),
                }
                gpus = rng.choice(["1", "1", "1", "1", "2", "1..2"])
                spec["resize"] = None if ".." in gpus else spec["resize"]
                made.append((await here.submit(gpus, **spec))["id"])
            elif what == "step":
                for j in live:
                    fleet.step(j.id)
            elif what == "end" and job is not None and job.resize.value != "live" and not job.ending:
                for worker in list(job.workers):
                    if worker in fleet.running and worker not in fleet.suspended:
                        fleet.end(worker)
            elif what in ("cancel", "pause", "resume") and job is not None:
                reply = await here.http.post(
                    f"/api/v1/jobs/{job.id}/{what}",
                    headers={"Authorization": f"Bearer {here.tokens['admin']}"},
                )
                assert reply.status_code in (200, 409), reply.text
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0.002)

    async def finish(here: Here) -> None:
        for job in list(here.loop.jobs.values()):
            if job.life.state.value == "paused":
                await here.post(f"/jobs/{job.id}/resume")
        for _ in range(3000):
            here.check()
            for job in list(here.loop.jobs.values()):
                fleet.step(job.id, total=3)
            for worker in list(fleet.running):
                if worker not in fleet.suspended and worker not in fleet.live:
                    fleet.end(worker)
            await asyncio.sleep(0.002)
            if not here.loop.jobs:
                break
        left = {j.id: (j.life, j.target, j.workers) for j in here.loop.jobs.values()}
        assert not left
        await asyncio.sleep(0.002)  # what ended in this turn is written in the next
        rows = {j["id"]: j for j in here.control.store.jobs(limit=1000)}
        assert set(rows) == set(made)
        assert {r["state"] for r in rows.values()} <= {"succeeded", "cancelled"}
        assert (fleet.running, here.loop.devices.used) == ({}, 0)
        assert not here.loop.devices.has_colocated
        assert here.control.store.unended_workers() == []
        assert sum(r["gpu_s"] for r in rows.values()) >= 0

    async def story() -> None:
        policy = rng.choice(["fifo", "srtf", "max-min"])
        for _ in range(5):
            fleet.deaf = False
            async with server(
                tmp_path, fleet=fleet, policy=policy, share=True, pre_schedule=True, kill=True
            ) as here:
                await doings(here)
                fleet.deaf = rng.random() < 0.5
                for _ in range(rng.randint(0, 2)):
                    await asyncio.sleep(0)
        fleet.deaf = False
        async with server(tmp_path, fleet=fleet, policy=policy) as here:
            await finish(here)
        assert made

    run(story())


def test_real_processes_share_a_gpu_one_inherits_it_and_the_next_prepares_and_is_let_in(
    tmp_path: Path,
) -> None:
    real = RealServer(tmp_path / "home", "--gpus", "1", "--policy", "fifo", "--share", "--pre-schedule")
    try:
        script = 'echo "gpu $SHOAL_GPU"; while [ ! -e "$0" ]; do sleep 0.05; done'
        ends = [tmp_path / "first", tmp_path / "second"]
        first, second = (real.submit("sh", "-c", script, str(end), needs=LIGHT)["id"] for end in ends)
        assert real.until(second, "running")["guest_of"] == first
        ends[0].touch()
        real.until(first, "succeeded")
        found = real.until(second, "running")
        while found["gpus"] == 0:
            found = real.job(second)
        assert (found["guest_of"], len(found["workers"])) == (None, 1), "it is the same process"
        # The third may only prepare: it waits for the file it is told of.
        waits = 'echo ready; while [ ! -e "$SHOAL_GO" ]; do sleep 0.05; done; echo let in'
        soon = tmp_path / "soon"
        ends[1].touch()
        real.until(second, "succeeded")
        host = real.submit("sh", "-c", script, str(soon), needs={"gpu_mem_mb": 100}, expected_s=10)["id"]
        real.until(host, "running")
        third = real.submit("sh", "-c", waits, needs={"gpu_mem_mb": 100, "pre_s": 1})["id"]
        lines: list[str] = []
        while lines != ["ready"]:
            lines = [line["text"] for line in real.http.get(f"/jobs/{third}/logs").json()["items"]]
        assert real.job(third)["state"] == "pending"
        soon.touch()
        assert real.until(third, "succeeded")["exit_code"] == 0
    finally:
        real.down() if real.process.poll() is None else None


def test_a_wake_that_is_lost_with_the_server_is_repeated_by_the_next(tmp_path: Path) -> None:
    fleet = Fleet(1)

    async def story() -> None:
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            made = (await here.submit("1", needs={"gpu_mem_mb": 1000, "gpu_util": 10}))["id"]
            await here.until(lambda: fleet.running)
            await here.post(f"/jobs/{made}/pause")
            await here.until(lambda: fleet.suspended)
            fleet.deaf = True  # the order is on record, and nobody hears it
            await here.post(f"/jobs/{made}/resume")
            await here.until(lambda: here.state(made) == "running")
            assert fleet.suspended
        fleet.deaf = False
        async with server(tmp_path, fleet=fleet) as here:
            await here.until(lambda: not fleet.suspended)
            assert here.state(made) == "running"

    run(story())
