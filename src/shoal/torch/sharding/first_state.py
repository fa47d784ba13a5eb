"""The description of a sharded state on its way to workers that get their rows afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.torch.data_order import DataOrder
from shoal.torch.receiver import Incoming
from shoal.torch.session import Session
from shoal.torch.state import ModelState
from shoal.torch.transfer import Window, sources_of
from shoal.wire.messages import Plan


def send_description(
    session: Session, plan: Plan, order: DataOrder, describe: Callable[[dict[str, Any]], bytes]
) -> None:
    """Send it to the newcomers of a plan. Each gets it from one of its sources."""
    step = order.position.step
    description = None
    for link in session.links:
        head: dict[str, Any] = {}
        if sources_of(plan, link.newcomer).index(session.name) == 0:
            description = description or describe(order.facts())
            head["description"] = description
        link.open_window(Window(step, True, head))
        link.end_with(step, {})
    session.release_links()


def receive_description(
    session: Session, plan: Plan, state: ModelState, incoming: Incoming | None = None
) -> bytes | None:
    """None: it did not arrive."""
    incoming = incoming or session.receiver.get(plan.number)
    if incoming is None:
        return None
    found = incoming
    session.wait_for(lambda: session.interrupted or bool(found.broken) or found.offered is not None)
    step = found.offered
    if step is None:
        return None
    session.receiver.open_gate(found, state, step, [])
    session.wait_for(lambda: found.broken or session.interrupted or found.has_ended(step))
    description = found.description(step)
    if description is None or not found.has_ended(step):
        return None
    session.receiver.finished(found.plan.number)
    return description
