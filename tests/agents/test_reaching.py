"""Agents try to connect to each other, as their workers do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

import pytest

from shoal.agents.reaching import OTHERS, Greeter, Reach, Reaching
from shoal.wire import agent_messages as am


async def tried(at: Mapping[str, tuple[str, str]]) -> tuple[dict[str, Reach], list[str]]:
    """What is found of agents that tell an address and listen on another, and whom each was asked to try."""
    reaching, asked, tasks = Reaching(), [], set()
    greeters = {
        agent: Greeter(bind, lambda answer, agent=agent: reaching.answered(agent, answer))  # type: ignore[misc]
        for agent, (_, bind) in at.items()
    }

    def send(agent: str, message: am.ToAgent) -> None:
        assert isinstance(message, am.Listen | am.Reach)
        if isinstance(message, am.Reach):
            asked.extend(message.others)
        tasks.add(asyncio.create_task(greeters[agent].received(message)))

    await reaching.try_all({agent: address for agent, (address, _) in at.items()}, send)
    for greeter in greeters.values():
        greeter.close()
    return reaching.known(at), asked


def test_an_address_that_leads_elsewhere_is_found_by_the_others_and_those_that_are_right_are_not_blamed() -> (
    None
):
    right = {f"m{i}": (f"127.0.0.{2 + i}", f"127.0.0.{2 + i}") for i in range(3)}
    found, _ = asyncio.run(tried({**right, "wrong": ("127.0.0.99", "127.0.0.9")}))
    assert found.pop("wrong").cut_off == dict.fromkeys(right, "connection refused")
    assert found == {name: Reach(address) for name, (address, _) in right.items()}


def test_an_address_that_the_machine_does_not_have_is_named() -> None:
    found, _ = asyncio.run(tried({"a": ("127.0.0.2", "127.0.0.2"), "b": ("192.0.2.7", "192.0.2.7")}))
    assert "192.0.2.7: cannot assign requested address" in found["b"].deaf
    assert found["a"] == Reach("127.0.0.2")


def test_another_program_on_the_same_port_is_not_taken_for_the_agent() -> None:
    async def story() -> dict[str, str]:
        answers: list[am.FromAgent] = []
        with socket.create_server(("127.0.0.1", 0)) as other:  # accepts, and says nothing
            address = f"127.0.0.1:{other.getsockname()[1]}"
            task = asyncio.create_task(
                Greeter("127.0.0.1", answers.append).received(am.Reach({address: "x" * 32}))
            )
            accepted, _ = await asyncio.to_thread(other.accept)
            accepted.sendall(b"y" * 32)
            await task
            accepted.close()
        (answer,) = answers
        assert isinstance(answer, am.Reached)
        return answer.failed

    assert list(asyncio.run(story()).values()) == ["another program answers there"]


def test_an_agent_that_does_not_answer_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.agents.reaching.ANSWER_S", 0.05)
    reaching = Reaching()
    asyncio.run(reaching.try_all({"a": "127.0.0.2", "b": "127.0.0.3"}, lambda agent, message: None))
    assert reaching.known(("a", "b")) == {}


def test_the_work_grows_with_the_number_of_agents_only_and_each_is_tried() -> None:
    count = 12
    found, asked = asyncio.run(tried({f"m{i}": ("127.0.0.1", "127.0.0.1") for i in range(count)}))
    assert len(asked) == OTHERS * count
    assert len(set(asked)) == count == len(found)
