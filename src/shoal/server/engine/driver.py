"""The loop that keeps the engine and the cluster in step: it polls the engine, decides, and acts.

It may be killed at any moment. The engine knows its machines by their names, so the next driver finds them with its
first poll. A token is written before its machine is requested and is removed when the machine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from shoal.engines.base import (
    AgentCommand,
    Engine,
    EngineError,
    EngineUnavailable,
    Machine,
    MachineRequest,
    MachineState,
    NewMachine,
)
from shoal.server.engine.port import UNTYPED, ClusterPort
from shoal.server.engine.provisioner import Provisioner
from shoal.server.engine.settings import EngineSettings
from shoal.server.engine.tokens import MachineTokens

log = logging.getLogger("shoal.engine")

TICK_S = 0.5
#: Interval between two polls while machines come or go, and while nothing happens.
BUSY_POLL_S, QUIET_POLL_S = 1.0, 5.0
DEADLINE_MOVED_S = 5.0
STALE_S = 60.0
"""If an agent says that its machine goes within this time and the engine does not, the agent is wrong: an engine would
have announced it by then."""
OFFERS_S = 15.0
"""How long the engine's answer about further machines is used."""


class EngineDriver:
    """`start` and `close` are its lifetime."""

    def __init__(
        self,
        engine: Engine,
        settings: EngineSettings,
        port: ClusterPort,
        tokens: MachineTokens,
        command: Callable[[str], AgentCommand],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command` makes the command of an agent that joins with the given token."""
        self.engine, self.settings, self.port = engine, settings, port
        self._tokens, self._command, self.now_s = tokens, command, now_s
        self.rules = Provisioner(engine.title, engine.id_word, settings.limits)
        self.rules.agents |= tokens.agents
        #: Why the engine does not answer. Empty: it does.
        self.unavailable = ""
        self.version = ""
        #: What further machines the engine could provide.
        self.offers: list[NewMachine] = []
        self._offered_s = self._polled_s = float("-inf")
        self._connected: frozenset[str] = frozenset()
        #: When each machine goes away, as the cluster was told.
        self._announced_s: dict[str, float] = {}
        #: Machines whose agent announced an end that the engine did not know of at the last poll.
        self._doubted: set[str] = set()
        self._to_come: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self, *, return_machines: bool) -> str:
        """Return all machines and wait until they are gone, or leave them for the next driver.

        The result says why some machines could not be returned; it is empty if there are none.
        """
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if not return_machines:
            await self.engine.detach()
            return ""
        try:
            await self.engine.close()
            for token in self._tokens.forget_all():
                self.port.drop_token(token)
        except EngineError as error:
            text = f"cannot return the machines: {error}"
            log.error(text)
            self.port.record("engine.failed", text)
            return text
        return ""

    async def _run(self) -> None:
        while True:
            try:
                await self.tick(self.now_s())
            except Exception:
                log.exception("the engine's driver failed; it goes on")
                await asyncio.sleep(BUSY_POLL_S)
            await asyncio.sleep(TICK_S)

    async def tick(self, now_s: float) -> None:
        """Poll if it is time, and act on what is new."""
        seen = self.port.agents()
        connected = frozenset(name for name, agent in seen.items() if agent.connected)
        interval_s = BUSY_POLL_S if self._is_busy() or connected != self._connected else QUIET_POLL_S
        if now_s - self._polled_s >= interval_s:
            self._connected = connected
            self._polled_s = now_s
            if not await self._poll(now_s):
                return
        if self.unavailable:
            return
        for agent, why in self.rules.ended(self.port.agents()).items():
            self.port.fenced(agent, why)
        await self._decide(now_s)
        self.port.keep_off(self.rules.keep_off(self.port.agents()))

    def _is_busy(self) -> bool:
        rules = self.rules
        return bool(rules.returning or rules.released or self.unavailable) or any(
            m.state is not MachineState.UP or m.id not in rules.joined for m in rules.machines.values()
        )

    async def _poll(self, now_s: float) -> bool:
        """Whether the engine answered."""
        try:
            found = await self.engine.poll()
            if not self.version:
                self.version = await self.engine.version()
        except EngineError as error:
            self._no_answer(error)
            return False
        if self.unavailable:
            self.port.record("engine.available", f"{self.engine.title} answers again")
            self.unavailable = ""
        before, released = dict(self.rules.machines), set(self.rules.released)
        gone = self.rules.polled(found, self.port.agents(), now_s)
        for token in self._tokens.update(found):
            self.port.drop_token(token)
        for machine in gone:
            # Before Shoal returns a machine, no worker is left on it.
            ended = machine.fenced or machine.id in released
            self._lost(machine, before.get(machine.id), ended=ended)
        for machine in found:
            self._changed(before.get(machine.id), machine)
            self._announce(machine)
        return True

    def _no_answer(self, error: EngineError) -> None:
        if not self.unavailable:
            self.port.record("engine.unavailable", f"{error}; its machines are used as before")
        self.unavailable = str(error)

    def _lost(self, machine: Machine, before: Machine | None, *, ended: bool) -> None:
        """`ended`: no process of its agent or workers is alive."""
        agent = machine.agent or (before.agent if before is not None else "")
        self.port.record(
            "engine.machine_gone",
            f"{self.named(machine)} is gone: {machine.reason}",
            machine=machine.id,
            agent=agent,
        )
        if ended and agent:
            self.port.fenced(agent, machine.reason)

    def _announce(self, machine: Machine) -> None:
        """Tell the cluster when the machine goes away, or that it stays after all."""
        if machine.state is MachineState.LEAVING and machine.leaving_at_s is not None:
            told_s = self._announced_s.get(machine.id)
            moved = told_s is None or abs(told_s - machine.leaving_at_s) > DEADLINE_MOVED_S
            if moved or self._is_forgotten(machine):
                self._announced_s[machine.id] = machine.leaving_at_s
                in_s = max(machine.leaving_at_s - self.now_s(), 0.0)
                self.port.leaving(machine.agent, in_s, machine.reason or f"{self.engine.title} takes it back")
            return
        was_told = self._announced_s.pop(machine.id, None) is not None
        seems_wrong, seemed_wrong = self._agent_is_wrong(machine), machine.id in self._doubted
        (self._doubted.add if seems_wrong else self._doubted.discard)(machine.id)
        # At two polls: the agent may have learned of it between the engine's answer and now.
        if machine.state is MachineState.UP and (was_told or (seems_wrong and seemed_wrong)):
            self.port.stays(machine.agent)

    def _is_forgotten(self, machine: Machine) -> bool:
        """Whether the cluster was told so and does not know it any more, because the agent has connected again."""
        agent = self.port.agents().get(machine.agent)
        return agent is not None and agent.connected and agent.leaves_in_s is None

    def _agent_is_wrong(self, machine: Machine) -> bool:
        """Whether the agent announced an end that is near by now, although the engine knows of none.

        An agent keeps its announcement, and repeats it when it connects again. The engine may have changed its mind.
        """
        agent = self.port.agents().get(machine.agent)
        return agent is not None and agent.leaves_in_s is not None and agent.leaves_in_s < STALE_S

    def _changed(self, before: Machine | None, machine: Machine) -> None:
        if machine.state in (MachineState.UP, MachineState.PENDING) and (
            before is None or before.state is not machine.state
        ):
            where = f" on {machine.node}" if machine.node else ""
            why = f" ({machine.reason})" if machine.reason else ""
            text = f"{self.named(machine)} is {machine.state}{where}{why}"
            self.port.record("engine.machine", text, machine=machine.id, agent=machine.agent)

    def named(self, machine: Machine) -> str:
        return f"{self.engine.title} {self.engine.id_word} {machine.id}"

    async def _decide(self, now_s: float) -> None:
        most_gpus = self.settings.nodes[1] * max([o.gpus for o in self.offers], default=8)
        demand = self.port.demand(most_gpus)
        if now_s - self._offered_s >= OFFERS_S:
            try:
                self.offers, self._offered_s = await self.engine.offers(drained=self._drained()), now_s
            except EngineError as error:
                self._no_answer(error)
                return
        self.port.expect(self.to_come())
        decision = self.rules.decide(demand, self.offers, self.port.agents(), now_s)
        for machine_id in decision.release:
            await self._release(machine_id)
        kinds = dict.fromkeys(decision.request)
        for kind in kinds:
            await self._request(kind, decision.request.count(kind), now_s)

    def _drained(self) -> set[str]:
        return {name for name, agent in self.port.agents().items() if agent.drained}

    def most_by_type(self) -> dict[str, int]:
        """The most GPUs of each type that all machines together could have now."""
        most = self.settings.nodes[1]
        of_type: dict[str, list[int]] = {}
        for machine in self.rules.machines.values():
            of_type.setdefault(machine.gpu_type, []).append(machine.gpus)
        for offer in self.offers:
            count = most if offer.count is None else offer.count
            of_type.setdefault(offer.gpu_type or "", []).extend([offer.gpus] * count)
        return {t: sum(sorted(gpus, reverse=True)[:most]) for t, gpus in of_type.items()}

    def to_come(self) -> dict[str, int]:
        """The same for the scheduler. It never falls: jobs may count on it."""
        for gpu_type, gpus in self.most_by_type().items():
            self._to_come[gpu_type] = max(self._to_come.get(gpu_type, 0), gpus)
        typed = {t: n for t, n in self._to_come.items() if t and n}
        untyped_gpus = self._to_come.get("", 0)
        return typed or ({UNTYPED: untyped_gpus} if untyped_gpus else {})

    async def _release(self, machine_id: str) -> None:
        machine = self.rules.machines[machine_id]
        self.port.keep_off(self.rules.keep_off(self.port.agents()))
        self.port.record(
            "engine.returned", f"{self.named(machine)} was idle and is returned", machine=machine_id
        )
        try:
            await self.engine.release(machine_id)
        except EngineError as error:
            self.rules.released.discard(machine_id)
            self.rules.trouble = str(error)

    async def _request(self, kind: NewMachine, n: int, now_s: float) -> None:
        tokens = [self.port.make_token(self._tokens.lifetime_s) for _ in range(n)]
        self._tokens.made([token_id for token_id, _ in tokens])
        commands = [self._command(token) for _, token in tokens]
        what = MachineRequest(kind.gpus, kind.gpu_type)
        accepted: Sequence[Machine] = ()
        try:
            accepted = await self.engine.request(
                what, commands, avoid=set(self.rules.unfenced), drained=self._drained()
            )
        except EngineUnavailable as error:
            # It may have accepted the request all the same: the tokens stay until the machines are known.
            self._no_answer(error)
            return
        except EngineError as error:
            if self.rules.trouble != str(error):
                self.port.record("engine.refused", str(error))
            self.rules.failed(str(error), now_s)
        self._offered_s = float("-inf")
        self.rules.requested(accepted)
        for token_id in self._tokens.assigned(accepted, [token_id for token_id, _ in tokens]):
            self.port.drop_token(token_id)
        if accepted:
            ids = ", ".join(m.id for m in accepted)
            text = f"requested {len(accepted)} from {self.engine.title}: {self.engine.id_word} {ids}"
            self.port.record("engine.requested", text, machines=[m.id for m in accepted])
