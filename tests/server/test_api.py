"""The API: who may do what, errors with one form, pages, keys; and the committed description of it all."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from shoal.executors.base import NodeInfo
from shoal.server.api import models
from shoal.server.api.app import make_app
from shoal.server.api.limits import Buckets
from shoal.wire.messages import Report

from .fakes import run, server

OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_the_committed_description_is_that_of_the_code() -> None:
    assert json.loads(OPENAPI.read_text()) == json.loads(json.dumps(make_app().openapi())), (
        "run: python -m shoal.server.api.describe > docs/openapi.json"
    )


def test_every_body_of_the_api_is_described_by_an_example_that_fits_it() -> None:
    described = make_app().openapi()
    bodies = json.dumps([described["paths"], "#/components/schemas/JobSpec"])
    named = {name for name in described["components"]["schemas"] if f'schemas/{name}"' in bodies}
    for name in sorted(named - {"Error"}):
        model = getattr(models, name)
        item = model.model_fields.get("items")
        model = item.annotation.__args__[0] if item is not None else model
        example = (model.model_config.get("json_schema_extra") or {}).get("example")
        assert example is not None, f"{model.__name__} has no example"
        model.model_validate_json(json.dumps(example))


def test_the_admin_token_is_made_once_for_its_owners_eyes_only_and_kept_hashed(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            path = here.control.home.admin_token
            token = path.read_text().strip()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            for file in tmp_path.glob("shoal.db*"):
                assert token.encode() not in file.read_bytes()
        async with server(tmp_path) as here:
            assert here.control.home.admin_token.read_text().strip() == token
            await here.get("/status", status=200)

    run(story())


def test_without_a_valid_token_every_answer_is_the_same(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            answers = [
                await here.get(path, user=user, status=401)
                for path in ("/jobs", "/jobs/1", "/users/ada", "/policy")
                for user in (None, "wrong", "shoal_" + "x" * 43)
            ]
            assert all(a == answers[0] for a in answers)
            assert answers[0]["error"]["code"] == "unauthorized"
            await here.get("/healthz", user=None, status=200)

    run(story())


def test_users_see_and_touch_their_own_jobs_viewers_look_admins_do_all(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            for name, role in (("ada", "user"), ("ben", "user"), ("vic", "viewer")):
                await here.add_user(name, role)
            job = (await here.submit("1", user="ada", name="secret-plan"))["id"]
            missing = await here.get("/jobs/999", user="ben", status=404)
            hidden = await here.get(f"/jobs/{job}", user="ben", status=404)
            assert {**missing["error"], "message": ""} == {**hidden["error"], "message": ""}
            assert (await here.get("/jobs", user="ben"))["items"] == []
            assert (await here.get("/jobs", user="ben", params={"user": "ada"}))["items"] == []
            assert (await here.get("/events", user="ben", params={"type": "job."}))["items"] == []
            for verb in ("cancel", "pause", "resume"):
                await here.post(f"/jobs/{job}/{verb}", user="ben", status=404)
                await here.post(f"/jobs/{job}/{verb}", user="vic", status=403)
            assert (await here.get(f"/jobs/{job}", user="vic"))["name"] == "secret-plan"
            await here.post("/jobs", user="vic", json={"command": ["x"]}, status=403)
            for method, path in (("POST", "/users"), ("PUT", "/policy"), ("POST", "/shutdown")):
                body = {"name": "fifo"} if path != "/shutdown" else {}
                await here.call(method, path, user="ada", json=body, status=403)
            await here.post("/tokens", user="ada", json={"user": "ben"}, status=403)
            await here.call("DELETE", "/tokens/1", user="ada", status=404)
            assert [u["name"] for u in (await here.get("/users", user="ada"))["items"]] == ["ada"]
            waiting = (await here.submit("4", user="ben"))["id"]
            await here.until(lambda: waiting in here.loop.scheduler.jobs)
            ahead = (await here.get(f"/jobs/{waiting}/why", user="ben"))["ahead"]
            assert [(j["user"], j["name"]) for j in ahead] == [("ada", None)], "who, but not what"
            assert (await here.post(f"/jobs/{job}/cancel"))["state"] == "stopping"

    run(story())


def test_a_deleted_or_expired_token_is_worth_nothing_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            made = await here.post(
                "/tokens", user="ada", json={"label": "laptop", "expires_in_s": 3600}, status=201
            )
            here.tokens["laptop"] = made["token"]
            await here.get("/status", user="laptop", status=200)
            here.control.clock.offset_s += 3601
            await here.get("/status", user="laptop", status=401)
            listed = (await here.get("/tokens", user="ada"))["items"]
            assert all("token" not in t for t in listed)
            first = min(t["id"] for t in listed)
            await here.call("DELETE", f"/tokens/{first}", status=204)
            await here.get("/status", user="ada", status=401)

    run(story())


def test_the_last_admin_stays_and_a_user_with_jobs_stays(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.call("DELETE", "/users/admin", status=409)
            await here.call("PATCH", "/users/admin", json={"role": "user"}, status=409)
            await here.add_user("ada")
            await here.submit("1", user="ada")
            await here.call("DELETE", "/users/ada", status=409)
            changed = await here.call("PATCH", "/users/ada", json={"tickets": 5})
            assert changed["tickets"] == 5

    run(story())


BAD_JOBS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 422, "command"),
    ({"command": []}, 422, "command"),
    ({"command": ["x"], "gpu": 1}, 422, "there is no field 'gpu'"),
    ({"command": ["x"], "gpus": "many"}, 422, "write 4, 1..8 for a range"),
    ({"command": ["x"], "gpus": "4..2"}, 422, "min 4 is above max 2"),
    ({"command": ["x"], "gpus": "5"}, 422, "this cluster has 4"),
    ({"command": ["x"], "gpu_types": ["h100"]}, 422, "no node has GPUs of type 'h100'"),
    ({"command": ["x"], "name": "../../etc"}, 422, "name"),
    ({"command": ["x"], "name": "a\nb"}, 422, "name"),
    ({"command": ["x"], "name": "n" * 10_000}, 422, "name"),
    ({"command": ["x"], "name": "17"}, 422, "number"),
    ({"command": ["x"], "workdir": "relative"}, 422, "absolute"),
    ({"command": ["x"], "workdir": "/a/../b"}, 422, "absolute"),
    ({"command": ["x\0"]}, 422, "command"),
    ({"command": ["x" * 70_000]}, 422, "script"),
    ({"command": ["x"], "env": {"A=B": "1"}}, 422, "env"),
    ({"command": ["x"], "env": {"A": "1"}, "secrets": {"A": "2"}}, 422, "both"),
    ({"command": ["x"], "gpus": "1..2", "resize": "never"}, 422, "range"),
    ({"command": ["x"], "requested_gpus": 3, "gpus": "1..2"}, 422, "not within"),
]


def test_a_bad_job_is_refused_with_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            for spec, status, words in BAD_JOBS:
                error = (await here.post("/jobs", json=spec, status=status))["error"]
                assert words in error["message"], spec
                assert "\n" not in error["message"]
                assert len(error["message"]) < 600
            assert here.control.store.jobs() == []
            assert list((tmp_path / "jobs").iterdir()) == []

    run(story())


def test_large_and_malformed_bodies_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            big = b'{"command": ["' + b"x" * (100 * 1024 * 1024) + b'"]}'
            assert (await here.post("/jobs", content=big, status=413))["error"]["code"] == "too_large"

            async def chunks() -> Any:
                for _ in range(20):
                    yield b"x" * 100_000

            assert (await here.post("/jobs", content=chunks(), status=413))["error"]["code"] == "too_large"
            assert (await here.post("/jobs", content=b"{", status=422))["error"]["code"] == "invalid"
            await here.post("/jobs", content=b"\xff\xfe", status=422)
            deep = b"[" * 100_000 + b"]" * 100_000
            await here.post("/jobs", content=deep, status=422)

    run(story())


def test_the_same_key_and_body_give_the_same_job_and_another_body_is_a_conflict(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            key = {"Idempotency-Key": "k-1"}
            body = {"command": ["x"]}
            first = await here.post("/jobs", json=body, headers=key, status=201)
            again = await here.post("/jobs", json=body, headers=key, status=200)
            assert first["id"] == again["id"]
            await here.post("/jobs", json={"command": ["y"]}, headers=key, status=409)
            other = await here.post("/jobs", json=body, headers=key, user="ada", status=201)
            assert other["id"] != first["id"], "keys are each user's own"
        async with server(tmp_path) as here:
            again = await here.post("/jobs", json=body, headers=key, status=200)
            assert first["id"] == again["id"], "also after a restart"

    run(story())


def test_lists_come_in_pages_that_miss_and_repeat_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            ids = [(await here.submit("1"))["id"] for _ in range(7)]
            seen, cursor = [], ""
            while cursor is not None:
                page = await here.get("/jobs", params={"limit": 3, "cursor": cursor})
                seen += [j["id"] for j in page["items"]]
                cursor = page["next"]
            assert seen == ids[::-1]
            events, cursor = [], "0"
            while True:
                page = await here.get("/events", params={"limit": 4, "cursor": cursor})
                cursor = page["next"]
                events += [e["id"] for e in page["items"]]
                if not page["items"]:
                    break
            assert events == list(range(1, len(events) + 1))
            await here.get("/jobs", params={"cursor": "x"}, status=422)
            await here.get("/jobs", params={"state": "flying"}, status=422)

    run(story())


def test_secrets_are_given_to_the_process_and_to_no_one_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = await here.submit("1", secrets={"KEY": "hunter2hunter2"}, env={"LR": "1"})
            await here.until(lambda: here.state(job["id"]) == "running")
            spec = here.fleet.running[f"{job['id']}.0"]
            assert spec.env["KEY"] == "hunter2hunter2"
            assert "hunter2" not in repr(spec)
            shown = await here.get(f"/jobs/{job['id']}")
            assert shown["secrets"] == ["KEY"]
            everything = json.dumps([shown, await here.get("/events")])
            assert "hunter2" not in everything
            for file in tmp_path.rglob("shoal.db*"):
                assert b"hunter2" not in file.read_bytes()
            kept = tmp_path / "jobs" / str(job["id"]) / "secrets.json"
            assert stat.S_IMODE(kept.stat().st_mode) == 0o600

    run(story())


def test_a_job_is_called_by_number_or_name_and_a_near_miss_is_suggested(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = await here.submit("1", name="resnet-a")
            assert (await here.get("/jobs/resnet-a"))["id"] == job["id"]
            assert "resnet-a" in (await here.get("/jobs/resnet-b", status=404))["error"]["hint"]
            await here.post("/jobs", json={"command": ["x"], "name": "resnet-a"}, status=409)
            for odd in ("..%2F..%2Fetc", "%00", "%ED%A0%80", "%0A", "9" * 30, "x" * 99):
                await here.get(f"/jobs/{odd}", status=404)
            await here.get(f"/jobs/{'x' * 200}", status=422)

    run(story())


def test_scale_changes_the_range_and_the_share_follows(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, policy="max-min") as here:
            job = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.state(job) == "running")
            assert (await here.post(f"/jobs/{job}/scale", json={"pin": 2}))["max_gpus"] == 2
            await here.until(lambda: here.gpus(job) == 2, train=(job,))
            await here.post(f"/jobs/{job}/scale", json={"min": 9}, status=422)
            await here.post(f"/jobs/{job}/scale", json={}, status=422)
            fixed = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(fixed) == "running")
            await here.post(f"/jobs/{fixed}/scale", json={"pin": 2}, status=409)

    run(story())


def test_a_job_with_a_step_has_multiples_of_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 5, policy="max-min") as here:
            job = await here.submit("2..8:2")
            assert (job["min_gpus"], job["max_gpus"], job["step_gpus"]) == (2, 8, 2)
            await here.until(lambda: here.gpus(job["id"]) == 4)
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.gpus(other) == 1)
            assert here.gpus(job["id"]) == 4
            wrong = await here.post(f"/jobs/{job['id']}/scale", json={"min": 3, "max": 9}, status=409)
            assert "3..9 are no multiples of 2: write 4..8:2" in wrong["error"]["message"]
            scaled = await here.post(f"/jobs/{job['id']}/scale", json={"max": 2})
            assert (scaled["max_gpus"], scaled["step_gpus"]) == (2, 2)
            await here.until(lambda: here.gpus(job["id"]) == 2, train=(job["id"],))
            assert (await here.get(f"/jobs/{job['id']}/why"))["job"]["step_gpus"] == 2
            for gpus, says in (("3..8:2", "write 4..8:2"), ("2..8:x", "2..8:2 for multiples")):
                body = {"command": ["x"], "gpus": gpus}
                assert says in str(await here.post("/jobs", json=body, status=422))

    run(story())


#: The families that users of such systems expect, and their labels; a queue is a user here, an agent the workers
#: of a node.
FAMILIES = {
    "jobs": {"user", "state", "reason"},
    "gpus": {"user", "type", "state"},
    "fair_share_ratio": {"user"},
    "queue_wait_seconds_bucket": {"user", "le"},
    "job_completion_seconds_bucket": {"user", "le"},
    "resize_seconds_bucket": {"phase", "le"},
    "resizes_total": {"direction", "outcome"},
    "preemptions_total": {"preemptor_user", "victim_user", "kind"},
    "lost_gpu_seconds_total": {"cause"},
    "decision_seconds_bucket": {"policy", "le"},
    "plan_superseded_total": set(),
    "agent_heartbeat_age_seconds": {"node"},
}


def test_metrics_have_the_families_that_operators_expect_in_the_format_prometheus_reads(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            await here.add_user("ada")
            first = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("1..4", user="ada"))["id"]
            await here.until(lambda: here.state(second) == "running", train=(first, second))
            await here.until(lambda: here.loop.jobs[first].size == 2, train=(first, second))
            here.fleet.crew(first)[0].send(Report(step=9, pause_generation=2, pause_s=0.25))
            await here.until(lambda: here.loop.jobs[first].stalled_s > 0, train=(first, second))
            here.fleet.step(second, total=1)
            await here.until(lambda: here.state(second) == "succeeded", train=(first,))
            text = await here.get("/metrics")
            found: dict[str, set[str]] = {}
            for line in text.splitlines():
                match = re.fullmatch(r"# (HELP|TYPE) shoal_\w+ .+|shoal_(\w+?)(?:{(.*)})? ([0-9.e+-]+)", line)
                assert match, line
                if match[2]:
                    labels = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', match[3] or "")
                    found.setdefault(match[2], set()).update(labels)
                    assert float(match[4]) >= 0
            assert {name: found.get(name) for name in FAMILIES} == FAMILIES
            states = set(re.findall(r'shoal_gpus{state="(\w+)"', text))
            assert states == {"allocated", "borrowed", "lent", "idle", "fragmented"}
            assert 'resizes_total{direction="shrink",outcome="done"} 1' in text
            await here.get("/metrics", user=None, status=401)  # this client is not on loopback

    run(story())


def test_free_gpus_that_suffice_for_a_waiting_job_but_lie_apart_are_counted_as_fragmented(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        nodes = (NodeInfo("a", 2, "v100", True), NodeInfo("b", 2, "k80", True))
        async with server(tmp_path, nodes, policy="fifo") as here:
            for gpu_type in ("v100", "k80"):
                await here.submit("1", gpu_types=[gpu_type])
            await here.until(lambda: here.loop.devices.used == 2)
            waits = (await here.submit("2"))["id"]
            await here.until(lambda: waits in here.loop.scheduler.jobs)
            text = await here.get("/metrics")
            reason = (await here.get(f"/jobs/{waits}"))["reason"]["code"]
            assert reason == "Fragmented"
            assert 'shoal_gpus{state="fragmented",type="k80",user=""} 1' in text
            assert 'shoal_gpus{state="idle",type="k80",user=""} 0' in text

    run(story())


def test_a_client_that_asks_too_often_is_told_to_wait_and_others_are_not() -> None:
    now = [0.0]
    buckets = Buckets(10.0, 5.0, clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(6)] == [True] * 5 + [False]
    assert buckets.take("b")
    now[0] = 0.1
    assert buckets.take("a")
    assert not buckets.take("a")


def test_a_job_is_described_alike_from_memory_and_from_the_store(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            single = (await here.submit("1..2", name="one", env={"LR": "1"}))["id"]
            await here.post(
                "/arrays", json={"command": ["train"], "workdir": "/tmp", "array": "0-1"}, status=201
            )
            await here.until(lambda: here.state(single) == "running" and not here.loop._inbox)
            for live in here.loop.jobs.values():
                row = here.control.store.job(live.id)
                row.pop("target")
                assert live.whole_row() == row

    run(story())
