"""Why a job has what it has, in words that its owner can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ShoalError
from shoal.core.words import counted, listed
from shoal.policies.max_min import MaxMin
from shoal.policies.registry import BUILT_IN
from shoal.server.services.naming import short_name

from .fakes import Fleet, Here, run, server
from .test_history import moment


async def why(here: Here, job: int, **more: Any) -> Any:
    return await here.get(f"/jobs/{job}/why", **more)


async def two_that_share(here: Here, one: str = "one", two: str = "two") -> tuple[int, int]:
    first = (await here.submit("1..4", name=one))["id"]
    await here.until(lambda: here.state(first) == "running")
    second = (await here.submit("1..4", name=two))["id"]
    await here.until(
        lambda: here.state(second) == "running" and here.loop.jobs[first].gpus == 2,
        train=(first, second),
    )
    return first, second


def test_a_job_that_could_be_larger_hears_who_has_the_rest_when_it_may_grow_and_what_it_could_do(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="afs-l") as here:
            first, second = await two_that_share(here)
            answer = await why(here, first)
            assert answer["reason"]["code"] == "NotWorthIt"
            gain = answer["reason"]["evidence"]["next_gpu_gain"]
            assert answer["reason"]["evidence"]["remaining_by"] == "the job's own count of steps"
            assert f"would add {100 * gain:.0f} %" in answer["sentence"]
            assert [(j["name"], j["gpus"]) for j in answer["ahead"]] == [("two", 2)]
            assert answer["starts_in"] is None
            assert (answer["grows_in"]["low_s"] is None) != (answer["grows_in"]["unknown"] is None)
            (could,) = answer["could"]
            assert (could["change"], could["value"]) == ("min_gpus", 3)
            assert "two would have 1 instead of 2" in could["sentence"]
            await here.post(f"/jobs/{first}/scale", json={"min": 3})
            await here.until(lambda: here.loop.jobs[first].size == 3, train=(first, second))
            assert here.gpus(second) == 1, "what was foretold comes to pass"

    run(story())


def test_a_job_that_would_gain_nothing_from_one_more_is_told_so_and_nothing_of_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="afs-l") as here:
            first, _ = await two_that_share(here)
            live = here.loop.jobs[first]
            live.gpu_type = "virtual"
            for gpus, step_s in ((1, 1.0), (2, 0.5), (3, 0.4999), (4, 0.49)):
                for _ in range(30):
                    here.loop.profiles.measured(live, gpus, 1, step_s)
            reason = here.control.services.reasons.reason
            await here.until(lambda: "would not make it faster" in reason(live).sentence, train=(first,))
            answer = await why(here, first)
            assert answer["reason"]["code"] == "NotWorthIt"
            assert (answer["ahead"], answer["could"], answer["grows_in"]) == ([], [], None)

    run(story())


def test_a_job_that_waits_for_its_turn_hears_when_that_is_though_nobody_knows_lengths(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            options = {"quantum_s": "36000"}  # so long that none ends while this runs
            await here.call("PUT", "/policy", json={"name": "gandiva-fair", "options": options})
            first = (await here.submit("4", name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("3", name="second"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            answer = await why(here, second)
            left_s = answer["reason"]["evidence"]["quantum_ends_in_s"]
            assert 0 < left_s <= 36000
            quanta = (answer["starts_in"]["high_s"] - left_s) / 36000
            assert quanta == pytest.approx(round(quanta), abs=1e-3), "its turn comes at the end of a quantum"
            assert "gandiva-fair allocates anew" in answer["starts_in"]["basis"]
            assert here.state(second) == "pending", "asking changes nothing"

    run(story())


def test_a_fair_policy_that_is_set_later_charges_nobody_for_the_time_before(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="fifo") as here:
            await here.submit("3", name="first")
            second = (await here.submit("2", name="second"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            await here.call("PUT", "/policy", json={"name": "gandiva-fair"})
            scheduler = here.loop.scheduler
            reason = here.control.services.reasons.reason(here.loop.jobs[second])
            assert reason.code in ("PendingEvaluation", "WaitingForCapacity"), "also before it has decided"
            await here.until(lambda: scheduler._decision is not None)
            lags = scheduler.view.column("lag_gpu_s")
            assert abs(lags).max() < 60, "in GPU-seconds"

    run(story())


def test_at_a_moment_of_growth_it_is_told_that_it_was_growing(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(4)
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            first, second = await two_that_share(here)
            await here.post(f"/jobs/{second}/cancel")
            live = here.loop.jobs[first]
            await here.until(lambda: live.target_gpus == 4)
            assert live.size == 2
            at = await moment(here)
            await here.until(lambda: live.size == 4, train=(first,))
            answer = await why(here, first, params={"at": at})
            assert answer["reason"]["code"] == "PendingEvaluation"
            assert "had been given 4 GPUs" in answer["sentence"]

    run(story())


def test_a_new_job_whose_workers_fail_is_told_that_it_failed(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(4)
        fleet.stubborn = True
        async with server(tmp_path, fleet=fleet) as here:
            job = (await here.submit("2", name="broken"))["id"]
            await here.until(lambda: here.state(job) == "running")
            fleet.end(f"{job}.0", 1)
            await here.until(lambda: here.loop.jobs[job].ending is not None)
            answer = await why(here, job)
            assert answer["reason"]["code"] == "PendingEvaluation"
            assert "it failed" in answer["sentence"]
            assert "is over when its 1 process has ended" in answer["sentence"]

    run(story())


@pytest.mark.parametrize("asks", ["admin", "ben"])
def test_who_waits_for_others_to_let_go_hears_their_names_where_it_may(tmp_path: Path, asks: str) -> None:
    async def story() -> None:
        fleet = Fleet(4)
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            await here.add_user("ada")
            await here.add_user("ben")
            first = (await here.submit("1..4", name="ada-first", user="ada"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("2", name="second", user="ben"))["id"]
            await here.until(lambda: second in here.loop.unmet)
            answer = await why(here, second, user=asks)
            assert answer["reason"]["code"] == "WaitingForRelease"
            who = {"admin": "ada-first", "ben": "a job of ada"}[asks]
            assert f"it was given 2 GPUs and waits until {who} has released them" in answer["sentence"]

    run(story())


def test_what_fits_under_a_policy_that_does_not_resize_is_told_as_a_size_with_the_command_for_it(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="fifo") as here:
            first = (await here.submit("3", name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("1..4", name="second"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            could = (await why(here, second))["could"]
            assert [(c["change"], c["value"]) for c in could] == [
                ("requested_gpus", 1),
                ("finish_job", "first"),
            ]
            assert could[0]["sentence"].endswith(
                "with 1 GPU instead of 4 it would start now: shoal scale second --max 1"
            )
            await here.post(f"/jobs/{second}/scale", json={"max": 1})
            await here.until(lambda: here.state(second) == "running")

    run(story())


def test_a_range_given_after_a_pin_asks_for_its_maximum_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            job = (await here.submit("1..4"))["id"]
            assert (await here.post(f"/jobs/{job}/scale", json={"pin": 3}))["requested_gpus"] == 3
            assert (await here.post(f"/jobs/{job}/scale", json={"min": 1, "max": 4}))["requested_gpus"] == 4
            jobs = here.loop.scheduler.jobs
            await here.until(lambda: job in jobs and jobs[job].requested_gpus == 4)
            other = (await here.submit("1..4", requested_gpus=2))["id"]
            assert (await here.post(f"/jobs/{other}/scale", json={"pin": 3}))["requested_gpus"] == 3
            assert (await here.post(f"/jobs/{other}/scale", json={"min": 1, "max": 4}))["requested_gpus"] == 2

    run(story())


def test_a_command_of_a_fixed_size_is_scaled_before_it_starts(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="fifo") as here:
            first = (await here.submit("3"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("2", resize="never"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            await here.post(f"/jobs/{second}/scale", json={"pin": 1})
            await here.until(lambda: here.state(second) == "running")
            assert here.gpus(second) == 1

    run(story())


def test_a_policy_that_cannot_tell_its_numbers_is_decided_by_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> Any:
        raise KeyError("numbers")

    monkeypatch.setattr(MaxMin, "evidence", cannot)

    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            first, _ = await two_that_share(here)
            assert (await why(here, first))["reason"]["evidence"]["evidence_failed"] == "KeyError: 'numbers'"
            assert here.loop.policy_name == "max-min"

    run(story())


class Broken(MaxMin):
    name = "broken"

    def decide(self, *_: Any) -> Any:
        raise ZeroDivisionError("by design")


def test_a_policy_that_fails_at_its_first_decision_is_refused_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "broken", f"{__name__}:Broken")

    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            job = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.state(job) == "running")
            error = await here.call("PUT", "/policy", json={"name": "broken"}, status=422)
            text = "policy broken fails (ZeroDivisionError: by design), so max-min stays in force"
            assert error["error"]["message"] == text
            assert (await here.get("/policy"))["name"] == here.loop.scheduler.policy.name == "max-min"
            assert here.control.store.get("policy")["name"] == "max-min"
            assert not here.control.store.events(type="policy.changed")

    run(story())


def test_a_stored_policy_that_is_gone_is_told_with_what_to_do(tmp_path: Path) -> None:
    async def with_a_policy_that_goes() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            with here.control.store.change(here.control.clock.now_s()) as change:
                change.put("policy", {"name": "mine", "options": {}})

    async def without() -> None:
        with pytest.raises(ShoalError, match=r"set last cannot be used.*'mine'.*shoal up --policy fair-afs"):
            async with server(tmp_path, 4, policy=None):
                pass
        async with server(tmp_path, 4, policy="fifo") as here:
            assert here.loop.policy_name == "fifo"

    run(with_a_policy_that_goes())
    run(without())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "/x/train.py", "--lr", "1"], "train"),
        (["sh", "-c", "echo hi; sleep 600"], "echo"),
        (["bash", "-lc", "cd /x && FAST=1 exec python3 train.py"], "train"),
        (["sh", "-c", "for i in 1 2; do echo $i; sleep 3; done"], "echo"),
        (["bash", "run_all.sh"], "run-all-sh"),
        (["python", "-c", "import time; time.sleep(1)"], "python"),
        (["env", "A=1", "uv", "run", "fit.py"], "fit"),
        (["sh", "-c", "cd /x"], "x"),
        (["sh"], "sh"),
        (["../../%%"], "job"),
    ],
)
def test_a_job_without_a_name_is_called_by_its_program(command: list[str], name: str) -> None:
    assert short_name(command) == name


def test_numbers_are_worded_as_people_do() -> None:
    assert [counted(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert counted(1, "GPU is", "GPUs are") == "1 GPU is"
    assert (listed([]), listed(["a"]), listed(["a", "b"])) == ("", "a", "a and b")
    assert listed(["a", "b"], 5) == "a, b and 3 more"
