"""How an agent finds the address of its machine when nobody gives it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal.agents.join_tokens import JoinToken
from shoal.agents.main import AgentOptions, _own_address, run
from shoal.core.errors import ShoalError

V4 = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 7070))
V6 = (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 7070, 0, 0))


class Probe:
    """A socket of a machine that reaches other machines by some families only."""

    def __init__(self, family: int, ways: set[int]) -> None:
        self.family, self.ways = family, ways

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, server: tuple[Any, ...]) -> None:
        if self.family not in self.ways:
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def getsockname(self) -> tuple[str, int]:
        return ("10.0.0.7" if self.family == socket.AF_INET else "fd00::7", 40000)


def machine(monkeypatch: pytest.MonkeyPatch, found: list[Any], ways: set[int]) -> list[str]:
    """The names that it was asked to resolve."""
    asked: list[str] = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        return found

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "socket", lambda family, *_: Probe(family, ways))
    return asked


@pytest.mark.parametrize(
    ("ways", "address"),
    [({socket.AF_INET}, "10.0.0.7"), ({socket.AF_INET6}, "fd00::7")],
)
def test_the_address_is_of_the_family_by_which_the_server_is_reached(
    monkeypatch: pytest.MonkeyPatch, ways: set[int], address: str
) -> None:
    asked = machine(monkeypatch, [V6, V4], ways)
    assert _own_address("[fd00::1]:7070") == address
    assert asked == ["fd00::1"]


def join(directory: Path, host: str) -> str:
    """What the agent says when it ends at once."""
    token = directory / "token"
    token.write_text(str(JoinToken("a" * 64, "b" * 48)))
    options = AgentOptions(
        f"{host}:7070", token, 1, None, "", "", address=None, name="a", state=directory / "state"
    )
    with pytest.raises(ShoalError) as ended:
        run(options)
    return str(ended.value)


def test_a_name_that_cannot_be_resolved_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("shoal.agents.main.LocalExecutor", Executor)
    words = join(tmp_path, "haed")
    assert "--join: the name 'haed' cannot be resolved here: " in words
    assert "Name or service not known" in words


class Executor:
    why_virtual = ""

    def __init__(self, *_: object, **__: object) -> None:
        pass


def test_a_server_to_which_no_way_leads_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [V6, V4], set())
    with pytest.raises(
        Exception, match=r"no route from this machine to head .--join.: .*unreachable.* --address"
    ):
        _own_address("head:7070")
