"""The policy in force, and changing it without a restart."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from shoal.core.errors import ShoalError
from shoal.core.options import make_options
from shoal.policies.base import Policy
from shoal.policies.registry import policy_class, policy_classes
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api import models as m
from shoal.server.store.store import Store


class PolicyLoop(Protocol):
    """What a change of policy needs of the control loop."""

    @property
    def policy_name(self) -> str: ...

    @property
    def policy_options(self) -> dict[str, str]: ...

    @property
    def scheduler(self) -> Scheduler: ...

    def now_s(self) -> float: ...

    async def compile_policy(self, name: str, options: dict[str, str]) -> None: ...

    def use_policy(self, name: str, options: dict[str, str]) -> None: ...


class PolicyInForce:
    def __init__(self, loop: PolicyLoop, store: Store) -> None:
        self._loop, self._store = loop, store

    def show(self) -> m.Policy:
        policy = self._loop.scheduler.policy
        return m.Policy(
            **_info(self._loop.policy_name, type(policy)).model_dump(),
            options=dataclasses.asdict(policy.options),
            available=[_info(name, cls) for name, cls in policy_classes().items()],
        )

    async def set(self, name: str, options: dict[str, str], actor: str) -> None:
        """Decide by another policy from now on. A policy that cannot be used is refused before anything changes."""
        make_options(policy_class(name), options)
        await self._loop.compile_policy(name, options)
        before = self._loop.policy_name, self._loop.policy_options
        self._loop.use_policy(name, options)  # raises if it fails on the present jobs
        try:
            with self._store.change(self._loop.now_s(), actor=actor) as change:
                change.put("policy", {"name": name, "options": options})
                data = {"policy": name, "before": before[0]}
                change.event("policy.changed", f"{before[0]} -> {name}", data=data)
        except ShoalError:
            self._loop.use_policy(*before)
            raise


def _info(name: str, cls: type[Policy]) -> m.PolicyInfo:
    return m.PolicyInfo(name=name, summary=cls.summary, elastic=cls.elastic, needs_lengths=cls.needs_lengths)
