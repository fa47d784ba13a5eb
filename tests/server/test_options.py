"""How a server is told where to be: its home, its address, its port."""

from __future__ import annotations

import socket
from asyncio import base_events
from pathlib import Path

import pytest

from shoal.server.home import default_home
from shoal.server.options import Options, PortInUse, bind, control_host, parse, warn_of_address


def test_the_home_is_where_the_xdg_rules_put_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("SHOAL_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_home() == Path("/home/ada/.local/state/shoal")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/ada")
    assert default_home() == Path("/var/ada/shoal")
    monkeypatch.setenv("SHOAL_HOME", "/srv/shoal")
    assert default_home() == Path("/srv/shoal")


def test_it_listens_on_this_machine_only_and_a_wider_address_warns() -> None:
    assert parse(["--home", "/x"]).host == "127.0.0.1"
    assert warn_of_address("127.0.0.1") is None
    assert warn_of_address("::1") is None
    assert "TLS" in (warn_of_address("0.0.0.0") or "")
    assert "TLS" in (warn_of_address("10.1.2.3") or "")


def test_a_port_that_was_asked_for_must_be_free_and_one_that_was_used_last_is_only_preferred() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            bind("127.0.0.1", port, None)
        with bind("127.0.0.1", 0, port) as other:
            assert other.getsockname()[1] != port


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio turns Nagle's algorithm off only for sockets that name their protocol."""
    with bind("127.0.0.1", 0, None) as listening:
        listening.setblocking(True)
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                base_events._set_nodelay(accepted)  # type: ignore[attr-defined]
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("host", "advertise", "has_engine", "listens_at"),
    [
        ("127.0.0.1", None, False, "127.0.0.1"),
        ("127.0.0.1", "10.0.0.1", False, "0.0.0.0"),
        ("127.0.0.1", None, True, "0.0.0.0"),
        ("127.0.0.1", "127.0.0.1", True, "127.0.0.1"),
        ("10.0.0.1", None, True, "10.0.0.1"),
    ],
)
def test_other_machines_can_connect_where_they_are_told_to(
    host: str, advertise: str | None, has_engine: bool, listens_at: str
) -> None:
    assert control_host(host, advertise, has_engine=has_engine) == listens_at


@pytest.mark.parametrize(
    ("words", "field", "expected"),
    [
        ("--gpus 4", "gpus", 4),
        ("--policy gandiva-fair --policy-option a=1 --policy-option b=x=y", "policy_options", {"a": "1", "b": "x=y"}),
        ("--no-share", "share", False),
        ("--allow-host a --allow-host b", "allow_hosts", ("a", "b")),
        ("--webhook-host h", "webhook_hosts", ("h",)),
        ("--lease 30", "lease_s", 30.0),
        ("--upload-limit-mb 7", "upload_limit_bytes", 7_000_000),
        ("--reset-clock", "reset_clock", True),
        ('--engine-settings {"kind":"ray"}', "engine", {"kind": "ray"}),
    ],
)  # fmt: skip
def test_an_argument_sets_its_option_and_no_other(
    monkeypatch: pytest.MonkeyPatch, words: str, field: str, expected: object
) -> None:
    monkeypatch.delenv("SHOAL_DATABASE", raising=False)
    found = parse(["--home", "/x", *words.split()])
    assert getattr(found, field) == expected
    names = {field, "policy"} if "--policy " in words else {field}
    for name in set(Options.__slots__) - names:
        assert getattr(found, name) == getattr(Options(Path("/x")), name)


@pytest.mark.parametrize(
    "words",
    [
        "--gpus -1",
        "--gpus many",
        "--explore 1.1",
        "--port 65536",
        "--control-port -1",
        "--lease 1",
        "--idle-after-s nan",
        "--upload-limit-mb 0",
        "--policy-option a=1",
        "--policy fifo --policy-option a",
        "--cluster c.yaml --gpus 1",
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("shoal.server.serve: error: ")
