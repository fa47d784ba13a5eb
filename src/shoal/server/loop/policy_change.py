"""Replace the policy of a scheduler that has jobs, or its nodes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.events import Finished, Submitted, Timer
from shoal.core.job import GpuRange, Job
from shoal.core.limits import MONDAY_S
from shoal.core.profile import Profile
from shoal.placement.placer import Placer
from shoal.policies.base import Policy
from shoal.scheduler.exploration.exploration import Exploration
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler

log = logging.getLogger("shoal.server")


def rehearsal(
    before: Scheduler, policy: Policy, placer: Placer, *, cool_down_s: float, now_s: float
) -> Callable[[], object]:
    """A first decision by the new policy on a copy of everything, to be made in another thread: it may compile
    kernels for seconds, and the API answers meanwhile."""
    saved = save(before) | {"policy": None, "policy_state": None}
    after = restore(
        saved, before.cluster, policy, before.jobs, before.profiles, placer, cool_down_s=cool_down_s,
        week_begin_s=MONDAY_S,
    )  # fmt: skip
    return partial(copy.deepcopy(after).step, now_s, [Timer()])


def first_decisions(scheduler: Scheduler) -> None:
    """Let a scheduler that is not used otherwise decide on some jobs of different kinds, so that its kernels exist.

    Compiling them takes a minute on a new installation. Done here, before the server listens, it delays no answer.
    """
    users = [*(user.name for user in scheduler.cluster.users), "default"]
    size = max(node.gpus for node in scheduler.cluster.nodes)
    speeds = Profile.of("", {gpus: gpus**-0.8 for gpus in range(1, size + 1)})
    ranges = [GpuRange(1, size), GpuRange(1, 1), GpuRange(size, size), GpuRange(1, size)]
    for number, gpus in enumerate(ranges):
        job = Job(f"job {number}", 0.0, gpus, gpus.min, user=users[number % len(users)], iterations=1e6)
        scheduler.step(float(number), [Submitted(number, job, speeds)])
    scheduler.step(1e3, [Finished(0, True)])
    scheduler.step(2e3, [Timer()])


def with_policy(
    before: Scheduler,
    in_force: str,
    name: str,
    policy: Callable[[], Policy],
    placer: Callable[[Policy], Placer],
    *,
    cool_down_s: float,
    now_s: float,
    exploration: Exploration | None = None,
) -> Scheduler:
    """A scheduler with the shares of `before` and the policy `name` instead of the one in force.

    Raises ShoalError if the new policy cannot decide on the present jobs.
    """
    try:
        made = policy()
        saved = save(before) | {"policy": None, "policy_state": None}
        after = restore(
            saved, before.cluster, made, before.jobs, before.profiles, placer(made), cool_down_s=cool_down_s,
            week_begin_s=MONDAY_S, exploration=exploration,
        )  # fmt: skip
        copy.deepcopy(after).step(now_s, [Timer()])
        return after
    except ShoalError:
        raise
    except Exception as error:
        log.exception("policy %s failed at its first decision", name)
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ShoalError(f"policy {name} fails ({what}), so {in_force} stays in force") from error


def with_nodes(
    before: Scheduler,
    cluster: Cluster,
    replaced: Set[str],
    policy: Callable[[], Policy],
    placer: Callable[[Policy], Placer],
    *,
    cool_down_s: float,
    exploration: Exploration | None = None,
) -> Scheduler:
    """A scheduler with the shares of `before` on other nodes. Jobs on nodes that are `replaced` lose their GPUs."""
    saved = save(before)
    if cluster.gpu_types != before.cluster.gpu_types:
        saved["policy_state"] = None  # policies keep accounts by type
    saved["nodes"] = [f"{name} as it was" if name in replaced else name for name in saved["nodes"]]

    def made(state: Mapping[str, Any]) -> Scheduler:
        fresh = policy()
        return restore(
            state, cluster, fresh, before.jobs, before.profiles, placer(fresh), cool_down_s=cool_down_s,
            week_begin_s=MONDAY_S, exploration=exploration,
        )  # fmt: skip

    try:
        return made(saved)
    except Exception:
        log.exception("the policy cannot continue with other nodes; it starts without its state")
        return made(saved | {"policy_state": None})
