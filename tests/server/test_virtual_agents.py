"""The agent processes of `shoal up --cluster`: whose children they are, and how they join again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.agents.registry import AgentRegistry, KnownAgent
from shoal.server import virtual_cluster
from shoal.server.virtual_cluster import VirtualCluster

ROW = {"name": "n0", "gpus": 1, "type": "v100", "rack": "rack0", "domain": "domain0"}


def ended(code: int) -> subprocess.Popen[bytes]:
    """A child that has ended and that nobody has waited for yet."""
    child = subprocess.Popen(["sh", "-c", f"exit {code}"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def test_only_the_agents_are_waited_for_and_not_other_children_of_the_process(tmp_path: Path) -> None:
    cluster = VirtualCluster(tmp_path, [])
    own, other = ended(0), ended(3)
    cluster._children.append(own)
    cluster._reap()
    assert own.returncode == 0
    assert not cluster._children
    assert other.wait() == 3, "whoever started it learns how it ended"


@pytest.mark.parametrize("known", [True, False])
def test_an_agent_that_was_removed_gets_a_new_token_and_a_known_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    registry = AgentRegistry(tmp_path / "agents.json")
    if known:
        registry.remember("n0", KnownAgent("hash"))
    machines: Any = SimpleNamespace(
        registry=registry, address="127.0.0.1:1", make_token=lambda lifetime_s: ("id", "a new token")
    )
    state = tmp_path / "nodes" / "n0"
    state.mkdir(parents=True)
    (state / "credential").write_text("of an earlier join")
    (state / "join-token").write_text("used")
    started = subprocess.Popen(["true"])
    monkeypatch.setattr(virtual_cluster.subprocess, "Popen", lambda *words, **options: started)
    VirtualCluster(tmp_path / "nodes", [ROW]).start(machines)
    started.wait()
    assert (state / "join-token").read_text().strip() == ("used" if known else "a new token")
