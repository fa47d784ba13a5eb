"""What `doctor` says of machines that differ from the others."""

from __future__ import annotations

import pytest

from shoal.agents.reaching import Reach
from shoal.agents.shared import Sharing
from shoal.server.engine.findings import (
    AgentFacts,
    StateDirectory,
    machine_checks,
    node_findings,
    reach_check,
)

OWN = {"shoal": "0.1.0", "python": "3.11.2", "torch": "2.13.0"}


def agent(name: str, offset_s: float = 0.0, **changed: str | None) -> AgentFacts:
    versions = {k: v for k, v in {**OWN, **changed}.items() if v is not None}
    return AgentFacts(name, versions, offset_s)


CASES = {
    "all alike": ([agent("a"), agent("b")], []),
    "one without torch": (
        [agent("a"), agent("b", torch=None)],
        [("torch on nodes", "b", "its Python has no torch", "install torch 2.13.0 there")],
    ),
    "a clock a day ahead": (
        [agent("a", 86400.0)],
        [("clocks", "a", "its clock is 1 day ahead of the server's", "synchronise it")],
    ),
    "a clock behind": ([agent("a", -90.0)], [("clocks", "a", "90 s behind", "synchronise it")]),
    "the one that differs is named, not the server": (
        [agent("a", python="3.12.1"), agent("b", python="3.12.1"), agent("c")],
        [
            (
                "python on nodes",
                "c",
                "it has python 3.11.2, and the others have 3.12.1",
                "install python 3.12.1",
            )
        ],
    ),
    "of two the server decides": (
        [agent("a", torch="2.9.0"), agent("b")],
        [
            (
                "torch on nodes",
                "a",
                "it has torch 2.9.0, and the others have 2.13.0",
                "install torch 2.13.0 on a",
            )
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_machines_that_differ(case: str) -> None:
    agents, want = CASES[case]
    found = node_findings(agents, OWN)
    assert [(f.check, f.node) for f in found] == [(check, node) for check, node, _, _ in want]
    for finding, (_, _, words, hint) in zip(found, want):
        assert words in finding.message
        assert hint in finding.hint


def test_each_property_is_one_check_and_every_finding_says_what_to_do() -> None:
    checks = machine_checks([agent("a"), agent("b", 99999.0, torch=None)], OWN)
    assert [(c.name, c.status) for c in checks] == [
        ("ports", "ok"),
        ("clocks", "warning"),
        ("shoal on nodes", "ok"),
        ("python on nodes", "ok"),
        ("torch on nodes", "warning"),
    ]
    assert all(c.hint for c in checks if c.status != "ok")
    assert "b:" in checks[1].message
    assert machine_checks([], OWN) == []


SHARED = AgentFacts("a", OWN, sharing=Sharing(True))
ABSENT = AgentFacts("b", OWN, sharing=Sharing(False, "it cannot read /shared: no such file or directory"))
ASKED = AgentFacts("c", OWN)


def test_a_directory_that_was_said_to_be_shared_and_is_not_is_an_error_with_a_remedy() -> None:
    check = StateDirectory("/shared", declared=True).check([SHARED, ABSENT, ASKED])
    assert (check.name, check.status) == ("shared directory", "error")
    assert check.message == (
        "b: it does not share /shared (it cannot read /shared: no such file or directory): the state of its jobs goes "
        "through the control plane"
    )
    assert check.hint is not None
    assert "mount /shared there" in check.hint
    assert "`--shared none`" in check.hint
    assert [f.node for f in StateDirectory("/shared", declared=True).wrong([SHARED, ABSENT, ASKED])] == ["b"]


def test_without_a_claim_a_machine_need_not_share_anything() -> None:
    check = StateDirectory("/home/ada/jobs").check([SHARED, ABSENT])
    assert check.status == "ok"
    assert "through the control plane" in check.message
    assert StateDirectory("/home/ada/jobs").wrong([SHARED, ABSENT]) == []
    assert StateDirectory("/shared").check([SHARED]).message.startswith("all machines share /shared")


def test_while_a_machine_has_not_answered_nothing_is_claimed() -> None:
    check = StateDirectory("/shared").check([SHARED, ASKED])
    assert check.status == "warning"
    assert check.message.startswith("not known yet whether /shared is shared by c")
    assert check.hint is not None


def test_a_port_that_workers_cannot_reach_is_an_error_with_a_remedy() -> None:
    cut_off = AgentFacts("b", OWN, unreachable={"10.0.0.1:7071": "connection refused"})
    check = machine_checks([agent("a"), cut_off], OWN)[0]
    assert (check.name, check.status) == ("ports", "error")
    assert check.message == "b: workers there cannot connect to 10.0.0.1:7071: connection refused"
    assert check.hint is not None
    assert "open the port" in check.hint


def test_a_machine_that_others_cannot_connect_to_is_named_with_its_address_and_a_remedy() -> None:
    ways = {"a": Reach("10.0.0.1"), "b": Reach("10.9.9.9", cut_off={"c": "no answer", "a": "no answer"})}
    (check,) = reach_check(ways)
    assert (check.name, check.status) == ("between machines", "warning")
    assert check.message == "b: workers on a and c cannot connect to it at 10.9.9.9: no answer"
    assert check.hint is not None
    assert "--address" in check.hint
    assert "firewall" in check.hint
    (check,) = reach_check({"a": Reach("10.0.0.1"), "b": Reach("10.0.0.2")})
    assert (check.status, check.message) == ("ok", "2 machines can connect to each other, as was tried")
    (check,) = reach_check({"b": Reach("10.9.9.9", deaf="10.9.9.9: cannot assign requested address")})
    assert check.message == "b: workers there cannot listen at 10.9.9.9: cannot assign requested address"
    assert "--bind" in str(check.hint)
    assert reach_check({}) == []
