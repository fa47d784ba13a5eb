"""What people see of the engine: in `node ls`, `why`, `doctor`, and when a job is submitted."""

from __future__ import annotations

from shoal.server.api.models import Check
from shoal.server.engine.driver import EngineDriver
from shoal.server.engine.findings import CLOCK_OFF_S, clock_words

UNKNOWN_GPUS = 1 << 20
"""What an engine that has not answered yet might provide."""


class DriverView:
    """Implements `EngineView`."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver

    @property
    def title(self) -> str:
        d = self._driver
        return d.engine.title

    def of_node(self, name: str) -> str | None:
        """How the engine sees the node: `job 4711 is up on g1`."""
        d = self._driver
        for machine in d.rules.machines.values():
            if name == machine.agent or name.startswith(f"{machine.agent}-"):
                where = f" on {machine.node}" if machine.node not in ("", name) else ""
                why = f" ({machine.reason})" if machine.reason else ""
                return f"{d.engine.id_word} {machine.id} is {machine.state}{where}{why}"
        if name in d.rules.agents:
            return f"{d.engine.title} has no machine for it any more"
        return None

    def coming(self) -> str | None:
        """What to tell somebody whose job waits for machines."""
        d = self._driver
        if d.unavailable:
            return f"no further machine can be requested: {d.unavailable}"
        return d.rules.explain(d.now_s())

    def most_gpus(self, gpu_type: str | None) -> int:
        """The most GPUs of a type (None: of any one type) that all machines together could have."""
        d = self._driver
        if not d.offers and not d.rules.machines:
            return UNKNOWN_GPUS  # the engine has not answered yet
        sums = d.most_by_type()
        return max(sums.values(), default=0) if gpu_type is None else sums.get(gpu_type, 0)

    def checks(self) -> list[Check]:
        """For `doctor`."""
        d = self._driver
        title, name = d.engine.title, "engine"
        if d.unavailable:
            hint = "its machines are used as before; start the engine, or check that this machine may use it"
            return [Check(name=name, status="error", message=d.unavailable, hint=hint)]
        states = [m.state.value for m in d.rules.machines.values()]
        shown = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"
        low, high = d.settings.nodes
        text = f"{title} {d.version}; machines: {shown}; --nodes {low}..{high}"
        checks = [Check(name=name, status="ok", message=text)]
        if d.rules.trouble:
            hint = f"correct it, then `shoal down --keep-jobs` and `shoal up --engine {d.settings.kind} ...`"
            message = d.rules.explain(d.now_s()) or d.rules.trouble
            checks.append(Check(name="engine requests", status="warning", message=message, hint=hint))
        return [*checks, *self._clock_check(), self._ports_check()]

    def _clock_check(self) -> list[Check]:
        ahead_s, title = self._driver.engine.clock_ahead_s, self.title
        if ahead_s is None:
            return []
        name = "engine clock"
        if abs(ahead_s) < CLOCK_OFF_S:
            return [Check(name=name, status="ok", message=f"within {CLOCK_OFF_S:.0f} s of {title}'s")]
        text = f"the server's clock is {clock_words(abs(ahead_s))} {'behind' if ahead_s > 0 else 'ahead of'} {title}'s"
        hint = f"synchronise both (chronyd or ntpd); Shoal goes by {title}'s clock for its deadlines"
        return [Check(name=name, status="warning", message=text, hint=hint)]

    def _ports_check(self) -> Check:
        d = self._driver
        late = d.rules.late(d.port.agents(), d.now_s())
        address = d.port.address
        if not late:
            return Check(name="engine ports", status="ok", message=f"all agents have reached {address}")
        machine, for_s = late[0]
        text = f"{d.named(machine)} runs on {machine.node}, and its agent has not been connected for {for_s:.0f} s"
        hint = (
            f"the machines must reach {address} (open the port, or start with --host or --advertise), and "
            "must have the same Python and Shoal at the same path (or --agent-python)"
        )
        return Check(name="engine ports", status="error", message=text, hint=hint)
