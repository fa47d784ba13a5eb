"""The engine of a server: its settings from the command line and the store, its start and its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shoal.core.errors import ShoalError
from shoal.engines.base import Engine, EngineError, EngineUnavailable, MachineRequest
from shoal.server.api.models import Check
from shoal.server.engine.driver import EngineDriver
from shoal.server.engine.launch import agent_command, make_engine
from shoal.server.engine.port import ClusterPort
from shoal.server.engine.settings import EngineSettings, settings_from
from shoal.server.engine.tokens import KEY, MachineTokens
from shoal.server.engine.view import DriverView
from shoal.server.store.store import Store

SETTINGS = "engine"
HOME_ID = "home_id"


class EngineRefused(ShoalError):
    """The engine is absent, or would refuse every request. The server does not start."""


class ServerEngine:
    """`check` comes before anything else of the server is started, `start` when agents can connect.

    `driver` and `view` exist after `start`, if the server has an engine.
    """

    def __init__(
        self,
        store: Store,
        now_s: Callable[[], float],
        given: Mapping[str, Any] | None,
        virtual_gpus: int | None = None,
        make: Callable[[EngineSettings, str], Engine] = make_engine,
    ) -> None:
        """`given`: what was written on the command line, as for `settings_from`.

        `virtual_gpus`: for trying, each machine offers so many.
        """
        self._store, self._now_s, self._make = store, now_s, make
        self._given = dict(given or {})
        self._before: dict[str, Any] | None = store.get(SETTINGS)
        self.settings = settings_from(self._before, given)
        if self.settings is not None and virtual_gpus:
            self.settings = msgspec.structs.replace(self.settings, virtual_gpus=virtual_gpus)
        self._engine: Engine | None = None
        self._unavailable = ""
        self.driver: EngineDriver | None = None
        self.view: DriverView | None = None

    async def check(self) -> None:
        """Raise EngineRefused if the engine is absent, or would refuse every request."""
        if self.settings is None:
            return
        self._engine = self._make(self.settings, self.home_id)
        try:
            await check_engine(self._engine)
        except EngineError as error:
            # An engine that is away for a while is no reason to leave machines and their jobs alone.
            if self._given or not isinstance(error, EngineUnavailable):
                await self._engine.detach()
                raise EngineRefused(str(error)) from None
            self._unavailable = str(error)

    async def start(self, port: ClusterPort) -> None:
        """Take over the machines of the last server, and return those of another engine."""
        tokens = MachineTokens(self._store.get(KEY), lambda saved: self._put(KEY, saved))
        await self._return_machines_of_another(tokens, port)
        if self.settings is None:
            self._put(SETTINGS, None)
            port.expect({})
            return
        assert self._engine is not None
        command = agent_command(self.settings, port.address)
        driver = EngineDriver(self._engine, self.settings, port, tokens, command)
        driver.unavailable = self._unavailable
        self._put(SETTINGS, _saved(self.settings))
        self.driver, self.view = driver, DriverView(driver)
        driver.start()

    async def _return_machines_of_another(self, tokens: MachineTokens, port: ClusterPort) -> None:
        """The last server used another engine, or this one has none: nobody would return its machines any more."""
        before = settings_from(self._before, None)
        if before is None or (self.settings is not None and self.settings.kind == before.kind):
            return
        try:
            await self._make(before, self.home_id).close()
        except EngineError as error:
            raise EngineRefused(
                f"the machines of {before.kind} cannot be returned: {error}; use --engine {before.kind} until then"
            ) from None
        for token in tokens.forget_all():
            port.drop_token(token)

    async def close(self, *, return_machines: bool) -> str:
        """Why some machines could not be returned. Empty: all were, or shall stay."""
        return "" if self.driver is None else await self.driver.close(return_machines=return_machines)

    # What people see of it. Without an engine there is nothing to see.

    def of_node(self, name: str) -> str | None:
        return None if self.view is None else self.view.of_node(name)

    def coming(self) -> str | None:
        return None if self.view is None else self.view.coming()

    def most_gpus(self, gpu_type: str | None) -> int:
        return 0 if self.view is None else self.view.most_gpus(gpu_type)

    def checks(self) -> list[Check]:
        return [] if self.view is None else self.view.checks()

    @property
    def home_id(self) -> str:
        """What the names of this home's machines have in common."""
        found = self._store.get(HOME_ID)
        if found is None:
            found = secrets.token_hex(4)
            self._put(HOME_ID, found)
        return str(found)

    def _put(self, key: str, value: Any) -> None:
        with self._store.change(self._now_s()) as change:
            change.put(key, value)


async def check_engine(engine: Engine) -> None:
    """Raise EngineError if the engine does not answer or would refuse every request."""
    await engine.version()
    for offer in (await engine.offers())[:1]:
        await engine.check(MachineRequest(offer.gpus, offer.gpu_type))


def _saved(settings: EngineSettings) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return found
