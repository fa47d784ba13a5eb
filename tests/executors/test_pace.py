"""Few keepers start at the same time, the others in order, and none waits for one that died or hangs."""

from __future__ import annotations

import asyncio
import os

from shoal.executors import pace
from shoal.executors.pace import Pace


class Keepers:
    """Pretended keepers: each holds the end of a pipe until it has started."""

    def __init__(self, paced: Pace) -> None:
        self.paced = paced
        self.starting: dict[str, int] = {}
        self.began: list[str] = []

    def start(self, *names: str) -> None:
        for name in names:
            self.paced.when_free(lambda name=name: self._begin(name))

    def _begin(self, name: str) -> None:
        started, self.starting[name] = os.pipe()
        self.began.append(name)
        self.paced.watch(started)

    async def has_started(self, name: str) -> None:
        os.close(self.starting.pop(name))
        await asyncio.sleep(0.01)


def test_the_others_wait_in_order_until_one_has_started() -> None:
    async def story() -> None:
        keepers = Keepers(Pace(most=2))
        keepers.start("a", "b", "c", "d")
        assert keepers.began == ["a", "b"]
        await keepers.has_started("b")
        assert keepers.began == ["a", "b", "c"]
        await keepers.has_started("a")
        await keepers.has_started("c")
        assert keepers.began == ["a", "b", "c", "d"]
        await keepers.has_started("d")

    asyncio.run(story())


def test_a_start_that_fails_or_needs_no_keeper_takes_no_place() -> None:
    async def story() -> None:
        keepers = Keepers(Pace(most=1))
        keepers.start("a")
        keepers.paced.when_free(lambda: keepers.began.append("fails"))
        keepers.start("b", "c")
        await keepers.has_started("a")
        assert keepers.began == ["a", "fails", "b"]
        keepers.paced.close()

    asyncio.run(story())


def test_a_start_that_raises_keeps_no_other_waiting() -> None:
    def raises() -> None:
        raise RuntimeError("a fault in the program")

    async def story() -> None:
        keepers = Keepers(Pace(most=1))
        keepers.start("a")
        keepers.paced.when_free(raises)
        keepers.start("b")
        await keepers.has_started("a")
        assert keepers.began == ["a", "b"]
        keepers.paced.close()

    asyncio.run(story())


def test_a_keeper_that_hangs_keeps_the_others_for_a_limited_time(monkeypatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(pace, "LONGEST_START_S", 0.05)
        keepers = Keepers(Pace(most=1))
        keepers.start("hangs", "b")
        assert keepers.began == ["hangs"]
        while len(keepers.began) < 2:
            await asyncio.sleep(0.01)
        keepers.paced.close()

    asyncio.run(story())


def test_after_the_end_nothing_starts() -> None:
    async def story() -> None:
        keepers = Keepers(Pace(most=1))
        keepers.start("a", "b")
        keepers.paced.close()
        await keepers.has_started("a")
        assert keepers.began == ["a"]

    asyncio.run(story())
