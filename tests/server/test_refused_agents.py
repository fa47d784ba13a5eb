"""Agents that were refused are shown where whoever runs the cluster looks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from shoal.agents.refusals import MOST, Refusal, Refusals
from shoal.cli import node as node_commands
from shoal.client import Client
from shoal.server.api import models as m
from shoal.server.control import Control
from shoal.server.options import Options

WHY = "the join token has expired: `shoal node join-token create` makes a new one"


async def with_refusals(home: Path) -> tuple[m.NodeList, m.NodeList, m.Doctor, list[str]]:
    """What an admin and a user see of the nodes, the findings, and the events, after a refusal."""
    control = Control(Options(home, gpus=1))
    assert control.machines is not None
    control.make_admin()
    control.notifier.start()
    control.machines.executor.refusals.on_refused = control._agent_refused
    await control.loop.start()
    refused = Refusal("gpu7", "10.0.0.7", WHY, control.loop.now_s())
    for _ in range(3):
        control.machines.executor.refusals.add(refused)
    transport = httpx.ASGITransport(control.app)
    admin = {"Authorization": f"Bearer {control.home.admin_token.read_text().strip()}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as http:
        await http.post("/users", json={"name": "ada"}, headers=admin)
        made = await http.post("/tokens", json={"user": "ada"}, headers=admin)
        ada = {"Authorization": f"Bearer {made.json()['token']}"}
        nodes = [(await http.get("/nodes", headers=who)).json() for who in (admin, ada)]
        doctor = (await http.get("/doctor", headers=admin)).json()
        events: list[dict[str, str]] = []
        async with asyncio.timeout(30):
            while not events:  # they are written with the next change
                await asyncio.sleep(0.01)
                found = await http.get("/events", params={"type": "node.refused"}, headers=admin)
                events = found.json()["items"]
    await control.close()
    return (
        m.NodeList.model_validate(nodes[0]),
        m.NodeList.model_validate(nodes[1]),
        m.Doctor.model_validate(doctor),
        [event["message"] for event in events],
    )


def test_a_refused_agent_is_in_the_list_of_nodes_in_the_findings_and_once_in_the_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, ada, doctor, events = asyncio.run(with_refusals(tmp_path))
    ((agent, address, why),) = [(r.agent, r.address, r.why) for r in admin.refused]
    assert (agent, address, why) == ("gpu7", "10.0.0.7", WHY)
    assert ada.refused == [], "only an admin can let it join"
    (check,) = [check for check in doctor.checks if check.name == "refused agents"]
    assert check.status == "warning"
    assert "agent gpu7 at 10.0.0.7: " + WHY in check.message
    assert doctor.healthy
    assert events == [f"agent gpu7 at 10.0.0.7 was refused: {WHY}"]

    monkeypatch.setattr(Client, "node_list", lambda self: admin)
    monkeypatch.setenv("SHOAL_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("SHOAL_TOKEN", "not used")
    shown = CliRunner().invoke(node_commands.ls, ["--home", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.output.splitlines() if "gpu7" in line]
    assert "10.0.0.7" in line
    assert WHY in line


def test_an_agent_that_joins_after_all_is_no_longer_shown_and_old_refusals_are_dropped() -> None:
    refusals = Refusals()
    refusals.add(Refusal("a", "10.0.0.1", "why", 1.0))
    refusals.add(Refusal("", "10.0.0.1", "a token", 2.0))
    refusals.add(Refusal("b", "10.0.0.1", "why", 3.0))
    refusals.accepted("a", "10.0.0.1")
    assert [r.agent for r in refusals.recent(4.0)] == ["b"], "another agent of that machine is still refused"
    assert refusals.recent(3.0 + 2 * 86400.0) == []
    for i in range(2 * MOST):
        refusals.add(Refusal(f"n{i}", "10.0.0.2", "why", 5.0))
    assert len(refusals.recent(5.0)) == MOST
