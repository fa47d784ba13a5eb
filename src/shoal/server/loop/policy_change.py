"""Replace the policy of a scheduler that has jobs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

from shoal.core.errors import ShoalError
from shoal.core.events import Timer
from shoal.placement.placer import Placer
from shoal.policies.base import Policy
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler

log = logging.getLogger("shoal.server")


def with_policy(
    before: Scheduler,
    in_force: str,
    name: str,
    policy: Callable[[], Policy],
    placer: Callable[[Policy], Placer],
    *,
    cool_down_s: float,
    now_s: float,
) -> Scheduler:
    """A scheduler with the shares of `before` and the policy `name` instead of the one in force.

    Raises ShoalError if the new policy cannot decide on the present jobs.
    """
    try:
        made = policy()
        saved = save(before) | {"policy": None, "policy_state": None}
        after = restore(
            saved, before.cluster, made, before.jobs, before.profiles, placer(made), cool_down_s=cool_down_s
        )
        copy.deepcopy(after).step(now_s, [Timer()])
        return after
    except ShoalError:
        raise
    except Exception as error:
        log.exception("policy %s failed at its first decision", name)
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ShoalError(f"policy {name} fails ({what}), so {in_force} stays in force") from error
