"""Which account the jobs of a user run under, and who gets no job. Workers are not real here."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from shoal.core.cluster import User
from shoal.executors.accounts import Account, Private, job_directories
from shoal.executors.base import NamedAccount, OwnAccount
from shoal.server.services.job_directories import KEEP_S, JobDirectories

from .fakes import Here, run, server

ME = getpass.getuser()
#: An account that this process can use, and which is not root's.
OTHER = "nobody" if os.geteuid() == 0 else ME


def _pretend(here: Here, *, root: bool) -> None:
    here.control.accounts._enforced, here.control.accounts._is_root = True, root


def test_where_the_server_is_root_jobs_run_as_their_owners_and_nobody_else_gets_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            _pretend(here, root=True)
            await here.add_user("ada")
            (told,) = (await here.get("/users/ada"))["warnings"]
            assert "user ada has no account on the machines, so no job can run for them" in told
            assert "shoal user set ada --account NAME" in told
            created = await here.post("/users", json={"name": "bob"}, status=201)
            assert "user bob has no account" in created["warnings"][0], "said at once"
            for needs_none in ({"name": "vic", "role": "viewer"}, {"name": "boss", "role": "admin"}):
                assert (await here.post("/users", json=needs_none, status=201))["warnings"] == []
            for name in ("bob", "vic", "boss"):
                await here.call("DELETE", f"/users/{name}", status=204)
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
            changed = await here.call("PATCH", "/users/ada", json={"account": OTHER})
            assert (changed["account"], changed["warnings"]) == (OTHER, [])
            fixed = (await here.submit("1", user="ada"))["id"]
            live = (await here.submit("1..2", user="ada"))["id"]
            mine = (await here.submit("1"))["id"]
            await here.until(lambda: len(here.fleet.running) == 4)
            accounts = {w.partition(".")[0]: spec.account for w, spec in here.fleet.running.items()}
            own = OwnAccount(may_be_root=True)
            assert accounts == {
                str(fixed): NamedAccount(OTHER),
                str(live): NamedAccount(OTHER),
                str(mine): own,
            }
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
            assert here.fleet.running[f"{job}.0"].account == OwnAccount(shared=True)
            mine = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(mine) == "running")
            # Whoever runs a job here can be the admin: that must not lead to root on a machine whose agent is root.
            assert here.fleet.running[f"{mine}.0"].account == OwnAccount(may_be_root=False)
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


def test_a_user_who_is_unknown_or_without_an_account_is_never_given_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            _pretend(here, root=True)
            await here.add_user("root")  # the name of a user is not the name of an account
            of = here.control.accounts.of
            assert of("root") == of("nobody-knows") == OwnAccount(shared=True)

    run(story())


def test_accounts_that_are_shared_or_roots_are_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            _pretend(here, root=True)
            first = await here.post("/users", json={"name": "ada", "account": OTHER}, status=201)
            assert first["warnings"] == []
            second = await here.post("/users", json={"name": "ben", "account": OTHER}, status=201)
            assert second["warnings"] == [
                f"ben shares the account '{OTHER}' with ada: they can read each other's files and secrets"
            ]
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["accounts"]["status"] == "warning"
            assert f"shares the account '{OTHER}'" in checks["accounts"]["message"]
            with here.control.store.change(0.0) as change:
                change.update_user("ben", account="root")
            third = await here.get("/users/ben")
            assert third["warnings"] == [
                "the jobs of ben run as root and can read everything, also the tokens of all users"
            ]
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert "the jobs of ben run as root" in checks["accounts"]["message"]

    run(story())


def test_a_server_without_gpus_takes_accounts_of_other_machines(tmp_path: Path) -> None:
    """Its agents may run as root and have the accounts. Where jobs run here, too, only its own account will do."""

    async def story() -> None:
        async with server(tmp_path) as here:
            here.control.accounts._own_gpus = False
            _pretend(here, root=False)
            elsewhere = {"account": "only-elsewhere"}
            await here.post("/users", json={"name": "ada", **elsewhere}, status=201)
            assert here.control.accounts.of("ada") == NamedAccount("only-elsewhere")
            here.control.accounts._own_gpus = True
            refused = await here.post("/users", json={"name": "ben", **elsewhere}, status=422)
            assert "the server cannot use it" in refused["error"]["message"]

    run(story())


@pytest.mark.parametrize(
    ("root", "said"),
    [
        (False, f"users of the cluster file (ada, ben) share the account '{ME}'"),
        (True, "users of the cluster file get no job until they have an account (ada, ben)"),
    ],
)
def test_users_of_a_cluster_file_have_no_account_and_that_is_said(
    tmp_path: Path, root: bool, said: str
) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            _pretend(here, root=root)
            here.control._described_users = [User("ada"), User("ben")]
            here.control.make_admin()
            here.control.make_admin()
            assert [said in warning for warning in here.control.loop.warnings].count(True) == 1

    run(story())


def test_the_directory_of_a_job_under_an_account_goes_a_day_after_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_JOBS_DIR", str(tmp_path / "jobs"))
    workers = tmp_path / "home" / "agent" / "workers"
    account = Account(ME, os.geteuid(), os.getegid(), (), "/", "/bin/sh")

    async def story() -> None:
        async with server(tmp_path / "home") as here:
            runs, ended = [(await here.submit("1"))["id"] for _ in range(2)]
            await here.until(lambda: here.state(ended) == "running")
            for job in (runs, ended, 99):
                made = Private(account, workers / f"{job}.0", f"{job}.0").job_directory()
                (made / "link").symlink_to("/etc")
            await here.post(f"/jobs/{ended}/cancel", json={})
            await here.until(lambda: here.state(ended) == "cancelled")

            def left() -> list[str]:
                return [path.name for path in job_directories(workers)]

            now_s = here.control.clock.now_s()
            await JobDirectories(here.control.store, workers, lambda: now_s + KEEP_S / 2).tidy()
            assert left() == [str(runs), str(ended)], "nobody knows job 99"
            await JobDirectories(here.control.store, workers, lambda: now_s + 2 * KEEP_S).tidy()
            assert left() == [str(runs)]
            assert os.listdir("/etc")

    run(story())
