"""The holder's side of a handover: what the training thread tells the links to newcomers at each point of a step."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.torch.data_order import DataOrder
from shoal.torch.replica import Replica
from shoal.torch.state import random_state
from shoal.torch.transfer import Link, Window
from shoal.wire.messages import Plan
from torch import Tensor


class Holder(Protocol):
    """What a holder needs of the membership: a `Session`."""

    @property
    def name(self) -> str: ...

    @property
    def done(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def growing(self) -> bool: ...

    @property
    def relays(self) -> bool: ...

    @property
    def sends_sums(self) -> bool: ...

    @property
    def interrupted(self) -> bool: ...

    @property
    def links(self) -> list[Link]: ...

    def release_links(self) -> None: ...

    def coming_links(self, flag: int) -> tuple[Plan, list[Link]] | None: ...


class Sending:
    """The holder's side. Its links are those of the present generation."""

    def __init__(self, holder: Holder, replica: Replica, order: DataOrder) -> None:
        self._holder, self._replica, self._order = holder, replica, order

    @property
    def busy(self) -> bool:
        return bool(self._holder.links)

    def rest_fits(self, flag: int) -> bool:
        """Whether one window is enough for what this worker has still to send; `flag` as in the vote."""
        state = self._replica.state
        if self._replica.several:
            return True
        if coming := self._holder.coming_links(flag):
            plan, links = coming
            self._load(plan, links)
            return not state.divisible or all(link.nearly_done for link in links)
        return not self._holder.growing or all(link.nearly_done for link in self._holder.links)

    def begin(self, plan: Plan) -> None:
        """Decide what to send to the newcomers of a plan. Without holders, rank 0 is the only source."""
        self._load(plan, self._holder.links)

    def _load(self, plan: Plan, links: list[Link]) -> None:
        for link in links:
            link.load(plan, self._holder.name, self._replica.state)

    def open(self, step: int, final: bool, first: bool) -> None:
        """Send from here on. The first window describes the state."""
        links, buckets = self._holder.links, self._replica.buckets
        # The first generation gets everything at once: its members wait for it before their first step.
        at_once = final and not self._holder.growing
        head = {}
        if first and any(link.index == 0 for link in links):
            head["description"] = self._replica.state.describe(self._facts(), whole=at_once)
        sums = len(buckets.buckets) if self._holder.relays and buckets is not None else 0
        for link in links:
            link.open_window(Window(step, final, head if link.index == 0 else {}, sums))
            if at_once:
                link.end_with(step, {"random": (self._holder.name, random_state(self._holder.on_gpu))})

    def hold(self) -> None:
        """Begin no further piece, except in the final window: the optimizer step is near."""
        for link in self._holder.links:
            link.hold()

    def describe_rest(self, step: int) -> None:
        """In the final window: everything but parameters, as it is at the end of backward.

        The newcomer adopts it at the end of its own backward. So it includes what the script and the model did in
        this step so far (buffers, random numbers, counters in `job.state`), and both do the rest of the step.
        """
        links, buckets = self._holder.links, self._replica.buckets
        if not links:
            return
        assert buckets is not None
        end: dict[str, Any] = {"random": (self._holder.name, random_state(self._holder.on_gpu))}
        described = {}
        if any(link.index == 0 for link in links):
            facts = {**self._facts(), "good": buckets.good_on_host}
            described["description"] = self._replica.state.describe(facts)
        for link in links:
            link.end_with(step, {**end, **described} if link.index == 0 else end)

    def give(self, flat: Tensor) -> None:
        """Send the summed gradients of a bucket."""
        if self._holder.sends_sums:
            for link in self._holder.links:
                link.give(flat)

    def wait_read(self, step: int) -> None:
        """Wait until the live tensors are read: from here on the script may change parameters."""
        for link in self._holder.links:
            link.wait_read(step, lambda: self._holder.interrupted)

    def close(self, step: int, final: bool, stepping: bool) -> None:
        """Wait for what is being sent, before the optimizer changes the state."""
        links = self._holder.links
        end = {"groups": self._replica.state.groups()} if stepping else {}
        for link in links:
            link.hold()
        for link in links:
            link.close_window(step, end, lambda: self._holder.interrupted)
        if final:
            self._holder.release_links()

    def _facts(self) -> dict[str, Any]:
        return {**self._order.facts(), "random": None, "done": self._holder.done}
