"""A server that is killed and started again decides as one that was never killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal.core.events import Timer
from shoal.executors.base import NodeInfo
from shoal.policies.registry import policy_names
from shoal.scheduler import saved
from shoal.server.loop.clock import Clock, go_on
from shoal.server.store.store import Store

from .fakes import Fleet, Here, run, server

NODES = tuple(NodeInfo(name, 3, "virtual", True) for name in ("a", "b"))
#: Each policy with its defaults, and with options that make turns short or that change what it remembers.
SETTINGS: list[tuple[str, dict[str, str]]] = [(name, {}) for name in policy_names()] + [
    ("fifo", {"backfill": "no"}),
    ("tiresias-l", {"thresholds_gpu_s": "20,100", "promote": "2", "service": "attained"}),
    ("tiresias-g", {"distribution_gpu_s": "5,50,500", "promote": "1"}),
    ("themis", {"lease_s": "60"}),
    ("afs-l", {"fold": "shortest"}),
    ("afs-p", {"quantum_s": "30", "tie": "coin"}),
    ("gandiva-fair", {"quantum_s": "30"}),
    ("fair-afs", {"inside": "afs-l"}),
]


class Time:
    """A clock that moves only when the story says so, and goes on over restarts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("shoal.server.control.go_on", self._go_on)

    def _go_on(self, store: Store, reset: bool) -> Clock:
        clock = Clock(wall=lambda: 1e9 + self.now_s, steady=lambda: self.now_s)
        return go_on(store, clock, boot="the same", reset=reset)


class Story:
    """Random things that people and jobs do, the same for every run with one seed."""

    def __init__(self, seed: int, home: Path, time: Time, setting: tuple[str, dict[str, str]]) -> None:
        self.rng = random.Random(seed)
        self.home, self.time, self.setting = home, time, setting
        self.fleet = Fleet(NODES)
        self.decisions: list[Any] = []
        self.jobs: list[int] = []
        self.stack = AsyncExitStack()
        self.drained = False

    async def start(self) -> None:
        self.here: Here = await self.stack.enter_async_context(
            server(self.home, fleet=self.fleet, policy=None, kill=True)
        )

    async def begin(self) -> None:
        await self.start()
        name, options = self.setting
        await self.here.call("PUT", "/policy", json={"name": name, "options": options})
        for user, tickets in (("ada", 2.0), ("ben", 1.0)):
            await self.here.add_user(user, tickets=tickets)
        self.tokens = self.here.tokens

    async def kill_and_restart(self) -> None:
        self.fleet.deaf = True
        await self.stack.aclose()
        self.fleet.deaf = False
        self.stack = AsyncExitStack()
        await self.start()
        self.here.tokens |= self.tokens

    async def act(self, kill: str) -> None:
        """One action; `kill`: the server is killed `at once` after it acknowledged the action, `later`, or `never`."""
        self.time.now_s += self.rng.choice((0.5, 7.0, 40.0))
        await self._something()
        if kill == "at once":
            await self.kill_and_restart()
        await self._quiet()
        if kill == "later":
            await self.kill_and_restart()
            await self._quiet()
        jobs = self.here.loop.jobs
        shares = {j: dict(jobs[j].target) if j in jobs and not jobs[j].is_over else None for j in self.jobs}
        self.decisions.append({j: at for j, at in shares.items() if at is not None})

    async def _something(self) -> None:
        rng, here = self.rng, self.here
        alive = [j for j in self.jobs if j in here.loop.jobs]
        what = rng.choice(
            (
                "submit",
                "submit",
                "submit",
                "finish",
                "finish",
                "pause",
                "resume",
                "cancel",
                "scale",
                "drain",
                "tick",
            )
        )
        one = rng.choice(alive) if alive else None
        if what == "submit" or one is None:
            size, resize = rng.randint(1, 4), rng.choice(("never", "restart"))
            gpus = str(size) if resize == "never" else f"{rng.randint(1, size)}..{size}"
            more = {"resize": resize, "expected_s": rng.choice((20.0, 90.0, 900.0)), "grace_s": 0.0}
            job = await here.submit(gpus, user=rng.choice(("ada", "ben")), **more)
            self.jobs.append(job["id"])
            return
        job = here.loop.jobs[one]
        state = job.life.state.value
        if what == "finish":
            for worker in list(job.workers):
                if worker in self.fleet.running and worker not in self.fleet.suspended:
                    self.fleet._ended(worker, 0, None, False)
        elif what == "pause" and state != "paused":
            await here.post(f"/jobs/{one}/pause")
        elif what == "resume" and state == "paused":
            await here.post(f"/jobs/{one}/resume")
        elif what == "cancel":
            await here.post(f"/jobs/{one}/cancel")
        elif what == "scale" and job.resize.value == "restart":
            await here.post(f"/jobs/{one}/scale", json={"min": 1, "max": rng.randint(1, 5)})
        elif what == "drain":
            self.drained = not self.drained
            await here.post(f"/nodes/b/{'drain' if self.drained else 'uncordon'}")
        else:
            here.loop.post(Timer())

    async def _quiet(self) -> None:
        loop = self.here.loop

        def is_quiet() -> bool:
            waits = loop._inbox or loop.reconciler or not loop.ready
            return not waits and all(j.gpus == j.target_gpus and not j.ending for j in loop.jobs.values())

        await self.here.until(is_quiet)
        self.here.check()


def play(tmp_path: Path, time: Time, seed: int, setting: Any, kills: Callable[[int], str]) -> list[Any]:
    time.now_s = 1000.0
    story = Story(seed, tmp_path, time, setting)

    async def all_of_it() -> None:
        await story.begin()
        try:
            for turn in range(14):
                await story.act(kills(turn))
        finally:
            await story.stack.aclose()

    run(all_of_it())
    return story.decisions


def by_seed(seed: int) -> Callable[[int], str]:
    """Kills at some turns, chosen by the seed."""
    rng = random.Random(1000 + seed)
    when = [rng.choice(("never", "at once", "later")) for _ in range(14)]
    return lambda turn: when[turn]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: " ".join([s[0], *map("=".join, s[1].items())]))
def test_a_server_that_is_killed_decides_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, dict[str, str]]
) -> None:
    time = Time(monkeypatch)
    for seed in range(2 if setting[1] else 1):
        whole = play(tmp_path / f"whole{seed}", time, seed, setting, lambda turn: "never")
        killed = play(tmp_path / f"killed{seed}", time, seed, setting, by_seed(seed))
        assert killed == whole, f"seed {seed}"
        assert len({json.dumps(d, sort_keys=True) for d in whole}) > 5, "the story changes hardly anything"


def test_a_server_that_forgets_what_the_policy_remembers_of_jobs_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = ("tiresias-l", {"thresholds_gpu_s": "20,100", "promote": "2", "service": "attained"})
    time, real = Time(monkeypatch), saved.restore

    def forgetful(kept: Any, cluster: Any, policy: Any, *args: Any, **more: Any) -> Any:
        columns = {k: [0.0] * len(v) if k in policy.columns else v for k, v in kept["columns"].items()}
        return real({**kept, "columns": columns}, cluster, policy, *args, **more)

    def differs(seed: int) -> bool:
        whole = play(tmp_path / f"whole{seed}", time, seed, setting, lambda turn: "never")
        with monkeypatch.context() as patch:
            patch.setattr("shoal.server.loop.restart.restore", forgetful)
            return play(tmp_path / f"killed{seed}", time, seed, setting, by_seed(seed)) != whole

    assert any(differs(seed) for seed in range(6))
