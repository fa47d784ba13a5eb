"""The engine's announcement reaches the control plane, once for each deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.agents import leaving_file


def test_each_deadline_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_file, "CHECK_S", 0.0)
    file, told = tmp_path / "leaving", list[float]()

    async def story() -> None:
        watch = leaving_file.watch_leaving_file(file, lambda in_s, why: told.append(in_s), lambda: 1000.0)
        task = asyncio.create_task(watch)

        async def turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        await turns()
        file.write_text("no number")
        await turns()
        assert told == []
        file.write_text("1100\n")
        await turns()
        file.write_text("900\n")
        await turns()
        assert told == [100.0, 0.0]
        task.cancel()

    asyncio.run(story())
