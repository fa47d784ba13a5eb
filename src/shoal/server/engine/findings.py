"""What is wrong with machines, and what to do about it: for `doctor` and for `node ls`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.agents.reaching import Reach
from shoal.agents.shared import Sharing
from shoal.core.words import counted, listed
from shoal.server.api.models import Check

CLOCK_OFF_S = 5.0
MOST_NAMED = 5
REACH = "between machines"


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent said of its machine when it connected."""

    name: str
    #: Of `shoal`, `python` and `torch`. A package that is not installed is absent.
    versions: Mapping[str, str] = field(default_factory=dict)
    #: Its wall clock minus that of the control plane.
    wall_offset_s: float = 0.0
    #: Whether its machine shares the directory of the jobs' state. None: it has not answered yet.
    sharing: Sharing | None = None
    #: Addresses that workers there cannot connect to, and why.
    unreachable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    node: str
    message: str
    hint: str


def node_findings(agents: Iterable[AgentFacts], own: Mapping[str, str]) -> list[Finding]:
    """Machines that differ from the others. `own` are the versions of the control plane itself."""
    agents = list(agents)
    usual = {package: _usual(package, agents, own) for package in ("shoal", "python", "torch")}
    found: list[Finding] = []
    for agent in agents:
        found += _clock(agent)
        found += _ports(agent)
        for package, version in usual.items():
            found += _version(agent, package, version)
    return found


def _usual(package: str, agents: Sequence[AgentFacts], own: Mapping[str, str]) -> str | None:
    """The version of most machines. If two are equally common, the control plane's own."""
    counts = Counter(a.versions[package] for a in agents if package in a.versions)
    if package in own:
        counts[own[package]] += 0
    return max(counts, key=lambda v: (counts[v], v == own.get(package), v), default=None)


def _clock(agent: AgentFacts) -> list[Finding]:
    off_s = agent.wall_offset_s
    if abs(off_s) < CLOCK_OFF_S:
        return []
    text = f"its clock is {clock_words(abs(off_s))} {'ahead of' if off_s > 0 else 'behind'} the server's"
    hint = "synchronise it (chronyd or ntpd); Shoal's own durations and log order do not depend on it"
    return [Finding("clocks", agent.name, text, hint)]


def _ports(agent: AgentFacts) -> list[Finding]:
    hint = "open the port there, or start the server with another address for its machines (see docs/clusters.md)"
    return [
        Finding("ports", agent.name, f"workers there cannot connect to {address}: {why}", hint)
        for address, why in agent.unreachable.items()
    ]


def reach_findings(ways: Mapping[str, Reach]) -> list[Finding]:
    """Machines that workers on other machines cannot connect to."""
    found: list[Finding] = []
    for name, way in ways.items():
        if way.deaf:
            hint = "start its agent with an --address of this machine, or with such an address as --bind"
            found.append(Finding(REACH, name, f"workers there cannot listen at {way.deaf}", hint))
        elif way.cut_off:
            others = listed(sorted(way.cut_off)[:MOST_NAMED], len(way.cut_off))
            why = listed(sorted(set(way.cut_off.values())))
            text = f"workers on {others} cannot connect to it at {way.address}: {why}"
            hint = (
                "start its agent with an --address that the other machines reach, and let the firewall there pass "
                "connections from the other machines to any port"
            )
            found.append(Finding(REACH, name, text, hint))
    return found


def reach_check(ways: Mapping[str, Reach]) -> list[Check]:
    """For `doctor`. Without a second machine there is nothing to check."""
    found = reach_findings(ways)
    if found:
        return [Check(name=REACH, status="warning", message=_together(found), hint=found[0].hint)]
    tried = f"{counted(len(ways), 'machine')} can connect to each other, as was tried"
    return [Check(name=REACH, status="ok", message=tried)] if ways else []


def _version(agent: AgentFacts, package: str, usual: str | None) -> list[Finding]:
    version = agent.versions.get(package)
    if version == usual:
        return []
    if version is None and package == "torch":
        text = "its Python has no torch: jobs that use shoal.torch fail there"
        hint = f"install torch {usual} there, or drain the node: shoal node drain {agent.name}"
        return [Finding("torch on nodes", agent.name, text, hint)]
    if version is None:
        return []
    others = f"the others have {usual}" if usual is not None else "the others have none"
    text = f"it has {package} {version}, and {others}"
    hint = f"install {package} {usual} on {agent.name}: the workers of one job must agree"
    return [Finding(f"{package} on nodes", agent.name, text, hint)]


def clock_words(seconds: float) -> str:
    for unit_s, unit in ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= 2 * unit_s or (unit_s == 86400.0 and seconds >= unit_s):
            return counted(round(seconds / unit_s, 1), unit)
    return f"{seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class StateDirectory:
    """Where the state of jobs is kept: what a pause saves, and checkpoints."""

    path: str
    #: Somebody said that all machines share it.
    declared: bool = False

    def wrong(self, agents: Iterable[AgentFacts]) -> list[Finding]:
        """Machines that do not share it although somebody said that they do."""
        return self._unshared(agents) if self.declared else []

    def _unshared(self, agents: Iterable[AgentFacts]) -> list[Finding]:
        remedy = (
            f"mount {self.path} there for the user of the agent, or start the server with `--shared none`"
        )
        then = "the state of its jobs goes through the control plane"
        return [
            Finding(
                "shared directory", a.name, f"it does not share {self.path} ({a.sharing.why}): {then}", remedy
            )
            for a in agents
            if a.sharing is not None and not a.sharing.shares
        ]

    def check(self, agents: Sequence[AgentFacts]) -> Check:
        name, found = "shared directory", self._unshared(agents)
        if found and self.declared:
            return Check(name=name, status="error", message=_together(found), hint=found[0].hint)
        silent = [a.name for a in agents if a.sharing is None]
        if silent:
            some = listed(silent[:MOST_NAMED], len(silent))
            text = (
                f"not known yet whether {self.path} is shared by {some}: state goes through the control plane"
            )
            hint = (
                f"if this stays so, the file system of {self.path} does not answer there: look at its mount"
            )
            return Check(name=name, status="warning", message=text, hint=hint)
        if found:
            some = listed([f.node for f in found[:MOST_NAMED]], len(found))
            text = f"{some} do not share {self.path}: the state of jobs there goes through the control plane"
            return Check(name=name, status="ok", message=text)
        return Check(name=name, status="ok", message=f"all machines share {self.path}, as was tried")


def machine_checks(agents: Sequence[AgentFacts], own: Mapping[str, str]) -> list[Check]:
    """One check for each property: in order, or which machines differ and what to do."""
    if not agents:
        return []
    found = node_findings(agents, own)
    checks = []
    for name, fine in {
        "ports": "workers on all machines can connect to the server",
        "clocks": f"{counted(len(agents), 'machine')} within {CLOCK_OFF_S:.0f} s of the server",
        "shoal on nodes": "the same version everywhere",
        "python on nodes": "the same version everywhere",
        "torch on nodes": "the same version everywhere",
    }.items():
        here = [f for f in found if f.check == name]
        if not here:
            checks.append(Check(name=name, status="ok", message=fine))
            continue
        status: Literal["warning", "error"] = "error" if name == "ports" else "warning"
        checks.append(Check(name=name, status=status, message=_together(here), hint=here[0].hint))
    return checks


def _together(found: Sequence[Finding]) -> str:
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(f"{f.node}: {f.message}" for f in found[:MOST_NAMED]) + more
