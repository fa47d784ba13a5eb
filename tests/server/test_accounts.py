"""Which account the jobs of a user run under, and who gets no job. Workers are not real here."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from .fakes import Here, run, server

ME = getpass.getuser()


def _pretend(here: Here, *, root: bool) -> None:
    here.control.accounts._enforced, here.control.accounts._is_root = True, root


def test_where_the_server_is_root_jobs_run_as_their_owners_and_nobody_else_gets_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            _pretend(here, root=True)
            await here.add_user("ada")
            body = {"command": ["train"], "workdir": "/tmp"}
            refused = await here.post("/jobs", user="ada", json=body, status=403)
            assert "user ada has no account on the machines" in refused["error"]["message"]
            assert "shoal user set ada --account NAME" in refused["error"]["message"]
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["accounts"]["status"] == "warning"
            unknown = {"account": "no-such-account"}
            refused = await here.call("PATCH", "/users/ada", json=unknown, status=422)
            assert "there is no account 'no-such-account' on this machine" in refused["error"]["message"]
            refused = await here.post("/users", json={"name": "eve", **unknown}, status=422)
            assert "there is no account" in refused["error"]["message"]
            refused = await here.post("/users", json={"name": "eve", "same_account": True}, status=422)
            assert "give the account of the user: --account NAME" in refused["error"]["message"]
            changed = await here.call("PATCH", "/users/ada", json={"account": ME})
            assert changed["account"] == ME
            fixed = (await here.submit("1", user="ada"))["id"]
            live = (await here.submit("1..2", user="ada"))["id"]
            mine = (await here.submit("1"))["id"]
            await here.until(lambda: len(here.fleet.running) == 4)
            accounts = {w.partition(".")[0]: spec.account for w, spec in here.fleet.running.items()}
            assert accounts == {str(fixed): ME, str(live): ME, str(mine): ""}
            assert "SHOAL_STATE_DIR" not in here.fleet.running[f"{live}.0"].env, "the home is closed to it"
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["accounts"]["status"] == "ok"

    run(story())


def test_where_the_server_is_not_root_a_second_user_must_be_confirmed(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            _pretend(here, root=False)
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["accounts"]["status"] == "ok"
            refused = await here.post("/users", json={"name": "ada"}, status=409)
            assert "they can read each other's files, secrets and tokens" in refused["error"]["message"]
            assert "--same-account" in refused["error"]["hint"]
            await here.post("/users", json={"name": "ada", "same_account": True}, status=201)
            here.tokens["ada"] = (await here.post("/tokens", json={"user": "ada"}))["token"]
            job = (await here.submit("1", user="ada"))["id"]
            await here.until(lambda: here.state(job) == "running")
            assert here.fleet.running[f"{job}.0"].account == ""
            found = next(c for c in (await here.get("/doctor"))["checks"] if c["name"] == "accounts")
            assert found["status"] == "warning"
            assert "2 users run under the account" in found["message"]

    run(story())


@pytest.mark.parametrize("account", ["", "a b", "-x", "x" * 70])
def test_a_name_that_no_account_has_is_refused(tmp_path: Path, account: str) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.post("/users", json={"name": "ada", "account": account}, status=422)

    run(story())
