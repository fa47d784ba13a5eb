"""Notifications: signed, in order, again after failures, and never to addresses inside."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.server.fakes import run, server

from shoal.core.errors import ShoalError
from shoal.server.notify import notifier, sender
from shoal.server.notify.address import Allowed, check_url, resolve
from shoal.server.notify.sender import signature


@dataclass
class Receiver:
    """An HTTP server that records what it is told, and answers with these statuses, then with 200."""

    statuses: list[int] = field(default_factory=list)
    hang: bool = False
    waiting: int = 0
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Receiver]:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/hook"
        async with listener:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:]) if k}
                body = await reader.readexactly(int(headers["content-length"]))
                if self.hang:
                    self.waiting += 1
                    await asyncio.sleep(3600)
                self.got.append((headers, body))
                status = self.statuses.pop(0) if self.statuses else 200
                where = "Location: http://127.0.0.1:1/\r\n" if status == 302 else ""
                writer.write(f"HTTP/1.1 {status} x\r\n{where}Content-Length: 0\r\n\r\n".encode())
                await writer.drain()
        writer.close()

    def events(self) -> list[str]:
        return [json.loads(body)["event"] for _, body in self.got]


HERE = ("127.0.0.0/8",)


def test_a_user_is_told_of_the_own_jobs_in_order_and_signed(tmp_path: Path) -> None:
    async def story() -> None:
        async with Receiver().open() as receiver, server(tmp_path, webhook_hosts=HERE) as here:
            await here.add_user("ada")
            body = {"url": receiver.url, "events": ["started", "finished", "failed"]}
            hook = await here.post("/webhooks", user="ada", json=body, status=201)
            other = (await here.submit("1"))["id"]
            job = await here.submit("1", user="ada", name="resnet")
            await here.until(lambda: here.gpus(other) == here.gpus(job["id"]) == 1)
            here.fleet.end(f"{other}.0")
            here.fleet.end(f"{job['id']}.0")
            await here.until(lambda: len(receiver.got) == 2)
            assert receiver.events() == ["started", "finished"]
            headers, content = receiver.got[1]
            assert json.loads(content)["job"] == {"id": job["id"], "name": "resnet"}
            proof = signature(hook["secret"], headers["x-shoal-timestamp"], content)
            assert headers["x-shoal-signature"] == f"sha256={proof}"
            await here.until(lambda: here.control.store.rows_of(tables().webhooks)[0]["sent"] == 2)
            (shown,) = (await here.get("/webhooks", user="ada"))["items"]
            assert (shown["sent"], shown["dropped"]) == (2, 0)
            assert "secret" not in shown
            assert shown["url"].endswith("/...")

    run(story())


def test_slack_gets_a_text_without_markup_of_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with Receiver().open() as receiver, server(tmp_path, webhook_hosts=HERE) as here:
            body = {"url": receiver.url, "format": "slack", "events": ["failed"]}
            await here.post("/webhooks", json=body, status=201)
            job = (await here.submit("1", name="resnet"))["id"]
            await here.until(lambda: here.gpus(job) == 1)
            here.fleet.end(f"{job}.0", 3)
            await here.until(lambda: receiver.got)
            text = json.loads(receiver.got[0][1])["text"]
            assert text.startswith(":x: *failed* resnet: ")
            assert "exit code 3" in text

    run(story())


def test_what_does_not_arrive_is_sent_again_and_a_hanging_receiver_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ATTEMPT_S", 0.3)

    async def story() -> None:
        async with (
            Receiver(hang=True).open() as hangs,
            Receiver([500, 302]).open() as receiver,
            server(tmp_path, webhook_hosts=HERE) as here,
        ):
            here.control.notifier._first_s = 0.05
            for url in (hangs.url, receiver.url):
                await here.post("/webhooks", json={"url": url, "events": ["started"]}, status=201)
            job = (await here.submit("1"))["id"]
            await here.until(lambda: len(receiver.got) == 3)
            assert receiver.events() == ["started"] * 3
            assert len({headers["x-shoal-delivery"] for headers, _ in receiver.got}) == 1
            rows = {}

            def failed_and_sent() -> bool:
                rows.update({w["id"]: w for w in here.control.store.rows_of(tables().webhooks)})
                return bool(rows[1]["attempts"] > 1 and rows[2]["sent"] == 1)

            await here.until(failed_and_sent)
            assert rows[1]["last_error"] == "it did not answer within 0.3 s"
            assert here.gpus(job) == 1

    run(story())


def tables() -> Any:
    from shoal.server.store import tables as found

    return found


def test_receivers_of_two_users_that_hang_delay_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ATTEMPT_S", 3600.0)

    async def story() -> None:
        async with (
            Receiver(hang=True).open() as hangs,
            Receiver().open() as works,
            server(tmp_path, 4, webhook_hosts=HERE) as here,
        ):
            for user in ("ada", "ben", "cyd"):
                await here.add_user(user)
            for user in ("ada", "ben"):
                for _ in range(10):
                    body = {"url": hangs.url, "events": ["started"]}
                    await here.post("/webhooks", user=user, json=body, status=201)
            jobs = [(await here.submit("1", user=user))["id"] for user in ("ada", "ben")]
            await here.until(lambda: all(here.gpus(job) for job in jobs))
            await here.until(lambda: hangs.waiting == 2 * sender.MOST_AT_ONCE)
            await here.post(
                "/webhooks", user="cyd", json={"url": works.url, "events": ["started"]}, status=201
            )
            await here.submit("1", user="cyd")
            await here.until(lambda: works.events() == ["started"])
            assert hangs.waiting == 2 * sender.MOST_AT_ONCE

    run(story())


def test_an_event_that_never_arrives_is_dropped_and_the_next_one_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MAX_ATTEMPTS", 2)

    async def story() -> None:
        async with Receiver([500, 302]).open() as receiver, server(tmp_path, webhook_hosts=HERE) as here:
            here.control.notifier._first_s = 0.01
            await here.post("/webhooks", json={"url": receiver.url, "events": ["started"]}, status=201)
            first, second = [(await here.submit("1"))["id"] for _ in range(2)]
            await here.until(lambda: len(receiver.got) == 3)
            jobs = [json.loads(body)["job"]["id"] for _, body in receiver.got]
            assert sorted(set(jobs)) == [first, second]
            assert jobs[0] == jobs[1] != jobs[2]

            def recorded() -> bool:
                (row,) = here.control.store.rows_of(tables().webhooks)
                return bool(row["dropped"] == 1 and row["sent"] == 1)

            await here.until(recorded)

    run(story())


def test_notifications_of_a_killed_server_are_sent_by_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with Receiver([500]).open() as receiver:
            async with server(tmp_path, webhook_hosts=HERE, kill=True) as here:
                await here.post("/webhooks", json={"url": receiver.url, "events": ["started"]}, status=201)
                job = (await here.submit("1"))["id"]
                await here.until(lambda: receiver.got and here.gpus(job) == 1)
                fleet = here.fleet
            async with server(tmp_path, fleet=fleet) as here:
                await here.until(lambda: len(receiver.got) == 2)
                assert receiver.events() == ["started", "started"]

    run(story())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:80/x", "127.0.0.1, which is not on the public internet"),
        ("http://localhost/x", "which is not on the public internet"),
        ("http://[::1]/x", "::1, which is not on the public internet"),
        ("http://[::ffff:10.0.0.1]/x", "which is not on the public internet"),
        ("http://169.254.169.254/latest/meta-data", "which is not on the public internet"),
        ("http://192.168.1.7/x", "which is not on the public internet"),
        ("http://2130706433/", "which is not on the public internet"),
        ("ftp://example.com/x", "begins with https:// or http://"),
        ("file:///etc/passwd", "begins with https:// or http://"),
        ("https://user:pass@example.com/", "leave out the user and password"),
        ("https://nowhere.invalid/", "cannot be found"),
        ("https://exa mple.com/", "without spaces"),
    ],
)
def test_urls_inside_are_refused(tmp_path: Path, url: str, message: str) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            refused = await here.post("/webhooks", json={"url": url}, status=422)
            assert message in refused["error"]["message"]
            assert not (await here.get("/webhooks"))["items"]

    run(story())


def test_a_name_that_changes_to_an_address_inside_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with Receiver().open() as receiver:
            port = int(receiver.url.rpartition(":")[2].partition("/")[0])

            async def getaddrinfo(*_: Any, **__: Any) -> Any:
                return [(0, 0, 0, "", ("127.0.0.1", port))]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
            out = sender.Sender(Allowed())
            with pytest.raises(ShoalError, match="not on the public internet"):
                await out.send(f"http://example.com:{port}/", "s", {}, user="ada", delivery="1", now_s=0.0)
            await out.close()
            assert not receiver.got

    run(story())


PUBLIC = ("8.8.8.8", "2606:4700::1111")
INSIDE = ("10.1.2.3", "100.64.0.1", "0.0.0.0", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "224.0.0.1",
          "fe80::1", "fd00::1", "255.255.255.255")  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC + INSIDE)
def test_which_addresses_are_public(address: str) -> None:
    assert Allowed().has("x", ipaddress.ip_address(address)) == (address in PUBLIC)
    assert Allowed(["x"]).has("X", ipaddress.ip_address(address))


def test_the_operator_may_allow_hosts_and_networks() -> None:
    async def story() -> None:
        assert check_url("http://localhost:80/") == "localhost"
        assert await resolve("localhost", 80, Allowed(["localhost"])) in ("127.0.0.1", "::1")
        assert await resolve("127.0.0.1", 80, Allowed(["127.0.0.0/8"])) == "127.0.0.1"

    run(story())


def test_only_the_owner_and_admins_see_and_remove_a_webhook(tmp_path: Path) -> None:
    async def story() -> None:
        async with Receiver().open() as receiver, server(tmp_path, webhook_hosts=HERE) as here:
            for user in ("ada", "ben"):
                await here.add_user(user)
            hook = await here.post("/webhooks", user="ada", json={"url": receiver.url}, status=201)
            assert not (await here.get("/webhooks", user="ben"))["items"]
            await here.call("DELETE", f"/webhooks/{hook['id']}", user="ben", status=404)
            tried = await here.post(f"/webhooks/{hook['id']}/test", user="ada")
            assert tried == {"arrived": True, "message": "it was accepted"}
            await here.call("DELETE", f"/webhooks/{hook['id']}", user="ada", status=204)
            assert not (await here.get("/webhooks"))["items"]

    run(story())
