"""Uploads of working directories: who may, how much, verified, used by jobs of their owner only, and collected."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from shoal.server.services import workdirs as w

from .fakes import Fleet, Here, run, server

CONTENT = b"an archive" * 100
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PATH = f"/api/v1/workdirs/{DIGEST}"


async def put(
    here: Here, user: str | None = "admin", content: object = CONTENT, path: str = PATH
) -> httpx.Response:
    headers = {} if user is None else {"Authorization": f"Bearer {here.tokens[user]}"}
    return await here.http.put(path, content=content, headers=headers)  # type: ignore[arg-type]


def test_an_upload_is_verified_and_serves_only_its_owner(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            for name, role in (("ada", "user"), ("ben", "user"), ("vic", "viewer")):
                await here.add_user(name, role)
            assert (await put(here, None)).status_code == 401
            assert (await put(here, "vic")).status_code == 403
            await here.get(f"/workdirs/{DIGEST}", user="ada", status=404)
            wrong = await put(here, "ada", CONTENT + b"!")
            assert wrong.status_code == 422
            assert "upload it again" in wrong.json()["error"]["message"]
            assert not list((tmp_path / "workdirs").glob("*/*")), "nothing is left"
            assert (await put(here, "ada")).json() == {"digest": DIGEST, "size_bytes": len(CONTENT)}
            assert (await put(here, "ada", b"")).status_code == 200, "it is there already"
            await here.get(f"/workdirs/{DIGEST}", user="ben", status=404)
            body = {"command": ["train"], "upload": True, "tree": DIGEST}
            refused = await here.post("/jobs", user="ben", json=body, status=404)
            assert "upload it again" in refused["error"]["hint"]
            await here.post("/jobs", user="ada", json=body | {"tree": None}, status=422)
            await here.post("/jobs", user="ada", json=body | {"upload": False}, status=422)
            await here.post("/jobs", user="ada", json=body, status=201)
            await here.until(lambda: here.fleet.running)
            assert [worker.tree for worker in here.fleet.running.values()] == [DIGEST]

    run(story())


def test_an_upload_over_the_limit_is_refused_before_and_while_it_is_read(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    async def story() -> None:
        async with server(tmp_path, upload_limit_bytes=2_000_000) as here:
            assert (await here.get("/status"))["upload_limit_bytes"] == 2_000_000
            told = await put(here, content=b"x" * 2_000_001)
            assert told.status_code == 413
            silent = await put(here, content=endless())
            assert silent.status_code in (413, 422)
            assert not list((tmp_path / "workdirs").glob("*/*"))
            large = b"y" * 1_900_000
            name = hashlib.sha256(large).hexdigest()
            assert (await put(here, content=large, path=f"/api/v1/workdirs/{name}")).status_code == 200
            other = await here.http.post(
                "/api/v1/jobs", content=large, headers={"Authorization": f"Bearer {here.tokens['admin']}"}
            )
            assert other.status_code == 413, "other requests keep their limit"

    run(story())


def test_what_no_unfinished_job_uses_is_deleted_after_an_hour(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, fleet=Fleet(1)) as here:
            await put(here)
            path = tmp_path / "workdirs" / "admin" / f"{DIGEST}.tar"
            job = await here.submit("1", upload=True, tree=DIGEST)
            long_ago = time.time() - 2 * w.KEEP_S
            os.utime(path, (long_ago, long_ago))
            tidy = here.control.services.workdirs.tidy
            assert await tidy() == [], "a job uses it"
            await here.until(lambda: here.fleet.running)
            (worker,) = here.fleet.running
            here.fleet.end(worker, 0)
            await here.until(lambda: here.state(job["id"]) == "succeeded")
            assert await tidy() == [path]
            assert here.control.services.workdirs.find(DIGEST) is None

    run(story())


def test_one_user_cannot_fill_the_disk(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, upload_limit_bytes=1_000_000) as here:
            codes = []
            for i in range(w.USER_ARCHIVES + 3):
                content = bytes([i]) * 990_000
                name = hashlib.sha256(content).hexdigest()
                answer = await put(here, content=content, path=f"/api/v1/workdirs/{name}")
                codes.append(answer.status_code)
            assert codes[:20] == [200] * 20
            assert codes[-1] == 409
            assert ".shoalignore" in answer.json()["error"]["hint"]

    run(story())
