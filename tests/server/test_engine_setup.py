"""The engine of a server: settings that are remembered, takeover, refusals, and changing or giving up the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ShoalError
from shoal.engines.base import Engine, EngineUnavailable, RequestRefused
from shoal.server.engine.settings import EngineSettings
from shoal.server.engine.setup import EngineRefused, ServerEngine
from shoal.server.home import Home
from shoal.server.store.store import Store

from .test_engine_driver import MemoryEngine, Port


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'shoal.db'}", where=str(tmp_path))


class Site:
    """What the cluster managers have: one engine of each kind and home."""

    def __init__(self) -> None:
        self.engines: dict[tuple[str, str], MemoryEngine] = {}

    def make(self, settings: EngineSettings, home_id: str) -> Engine:
        return self.engines.setdefault((settings.kind, home_id), MemoryEngine())

    def of(self, kind: str) -> MemoryEngine:
        return next(engine for (found, _), engine in self.engines.items() if found == kind)


def started(store: Store, site: Site, given: dict[str, Any] | None) -> tuple[ServerEngine, Port]:
    engine, port = ServerEngine(store, lambda: 1.0, given, make=site.make), Port()

    async def begin() -> None:
        await engine.check()
        await engine.start(port)
        if engine.driver is not None:
            await engine.driver.close(return_machines=False)  # the test ticks by hand

    asyncio.run(begin())
    return engine, port


def tick(engine: ServerEngine, now_s: float = 100.0) -> None:
    assert engine.driver is not None
    asyncio.run(engine.driver.tick(now_s))


def test_the_engine_is_remembered_and_its_machines_are_taken_over(store: Store) -> None:
    site = Site()
    first, _ = started(store, site, {"kind": "slurm", "nodes": [1, 3]})
    tick(first)
    assert len(site.of("slurm").machines) == 1, "the minimum is requested"
    second, _ = started(store, site, None)
    assert second.settings is not None
    assert second.settings.nodes == (1, 3)
    tick(second)
    assert len(site.engines) == 1, "the home keeps its id"
    assert len(site.of("slurm").machines) == 1, "the machine was found, not requested again"


def test_without_an_engine_nothing_is_made(store: Store) -> None:
    site = Site()
    engine, _ = started(store, site, None)
    assert engine.driver is None
    assert engine.view is None
    assert not site.engines


def test_giving_the_engine_up_or_changing_it_returns_its_machines(store: Store) -> None:
    site = Site()
    first, _ = started(store, site, {"kind": "slurm"})
    tick(first)
    changed, port = started(store, site, {"kind": "ray"})
    assert site.of("slurm").closed
    assert not port.tokens
    assert changed.driver is not None
    none, _ = started(store, site, {"kind": "none"})
    assert site.of("ray").closed
    assert none.driver is None
    again, _ = started(store, site, None)
    assert again.driver is None, "it is not remembered any more"


def test_an_engine_that_is_absent_stops_a_first_start_but_not_a_takeover(store: Store) -> None:
    site = Site()
    started(store, site, {"kind": "slurm"})
    site.of("slurm").down = True
    with pytest.raises(EngineRefused, match="Slurm does not answer"):
        started(store, site, {"kind": "slurm"})
    engine, _ = started(store, site, None)
    assert engine.driver is not None, "its machines and their jobs are not left alone"
    assert engine.view is not None
    assert engine.view.checks()[0].status == "error"


def test_an_engine_that_would_refuse_every_request_is_an_error_at_once(store: Store) -> None:
    async def refuse(what: object) -> None:
        raise RequestRefused("Slurm refuses the request: invalid partition specified: gold")

    class Refusing(Site):
        def make(self, settings: EngineSettings, home_id: str) -> Engine:
            engine = super().make(settings, home_id)
            engine.check = refuse  # type: ignore[method-assign]
            return engine

    with pytest.raises(EngineRefused, match="invalid partition"):
        started(store, Refusing(), {"kind": "slurm", "partition": "gold"})
    assert store.get("engine") is None, "what was refused is not remembered"


def test_a_machine_that_cannot_be_returned_keeps_its_engine(store: Store) -> None:
    site = Site()
    started(store, site, {"kind": "slurm"})

    async def fail() -> None:
        raise RequestRefused("Slurm has not ended these jobs")

    site.of("slurm").close = fail  # type: ignore[method-assign]
    with pytest.raises(EngineRefused, match="use --engine slurm until then"):
        started(store, site, {"kind": "none"})
    assert store.get("engine")["kind"] == "slurm"


def test_machines_that_stay_behind_are_told_to_whoever_ends_the_server(store: Store, tmp_path: Path) -> None:
    site = Site()
    engine, _ = started(store, site, {"kind": "ray"})

    async def fail() -> None:
        raise EngineUnavailable("Ray did not answer within 90 s")

    site.of("ray").close = fail  # type: ignore[method-assign]
    home = Home(tmp_path)
    left = asyncio.run(engine.close(return_machines=True))
    home.note_not_returned(left)
    assert home.not_returned() == "cannot return the machines: Ray did not answer within 90 s"
    home.note_not_returned(asyncio.run(engine.close(return_machines=False)))
    assert home.not_returned() == "", "what was left before is not told again"


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "is for --engine slurm": lambda: {"kind": "ray", "partition": "gpu"},
    "needs an engine": lambda: {"nodes": [1, 2]},
}


@pytest.mark.parametrize("words", WRONG)
def test_settings_that_make_no_sense(store: Store, words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        ServerEngine(store, lambda: 1.0, WRONG[words]())
