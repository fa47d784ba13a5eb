"""The scheduler's cycle: events in, commands out. No I/O, no clock: `now_s` is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.cluster import Cluster, User
from shoal.core.decision import Decision
from shoal.core.errors import ShoalError
from shoal.core.events import (
    Cancelled,
    Capped,
    Event,
    Finished,
    Held,
    Measured,
    NodeBack,
    NodeLost,
    PeopleChanged,
    Rescaled,
    Submitted,
    TicketsChanged,
    Timer,
    WorkerFailed,
)
from shoal.core.job import GpuRange, Job
from shoal.core.plan import (
    GPUS,
    JOB,
    NO_CHANGES,
    NO_SHARE,
    Cause,
    CauseKind,
    Outcome,
    Placement,
    Plan,
    Share,
    TrialNote,
)
from shoal.core.profile import Profile
from shoal.core.reason import Code, Reason
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.core.view_kernels import FLOATS, INTS
from shoal.placement.placer import Placed, Placer, PoolPlacer
from shoal.policies.base import Policy
from shoal.scheduler.contract import checked
from shoal.scheduler.difference import After, Before, share_of, starts, whole_difference
from shoal.scheduler.explain import Situation, explain, held_by_autoscaler
from shoal.scheduler.left_over import give_left_over
from shoal.scheduler.limits.admission import Admission
from shoal.scheduler.limits.own_order import in_own_order
from shoal.scheduler.limits.reasons import reason_of
from shoal.scheduler.limits.rounds import before_all_rounds
from shoal.scheduler.limits.shared_tickets import with_shared_tickets
from shoal.scheduler.steps import in_steps, trimmed

if TYPE_CHECKING:
    from shoal.scheduler.exploration.exploration import Books, Exploration
    from shoal.scheduler.exploration.outlook import Outlook

#: Speed tables are rebuilt when they hold more profiles than this and four per active job.
_FEW_PROFILES = 1000
#: Maximum rounds per decision in which GPUs that could not be placed are offered to other jobs.
_ROUNDS = 4
_GENERATION = INTS.index("generation")
_PROGRESS = [FLOATS.index(name) for name in ("remaining", "rate", "settled_s")]
#: Maximum decisions per step in which GPUs that a limit reserved in vain are offered to other jobs.
_OFFERS = 8


class Scheduler:
    """Decides for one cluster. Its state changes only through `step`, `take_in` and `observe`."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        placer: Placer | None = None,
        *,
        cool_down_s: float = 0.0,
        week_begin_s: float | None = None,
        exploration: Exploration | None = None,
    ) -> None:
        """`exploration` measures jobs at other sizes; without it, shares are those of the policy.

        `week_begin_s`: when some week begins. Without it, GPU time is counted only if the cluster has limits."""
        self.cluster = cluster
        self.policy = policy
        self.exploration = exploration
        self.placer: Placer = placer or PoolPlacer()
        self.cool_down_s = cool_down_s
        self.supply = Supply.of(cluster)
        self.view = View(cluster.gpu_types, cluster.total_gpus, policy.columns)
        self.jobs: dict[int, Job] = {}
        self.profiles: dict[int, Profile] = {}
        #: The placement of each running job; empty for a pool.
        self.placements: dict[int, Placement] = {}
        #: Jobs that their owners hold, each with its row of the view.
        self.held: dict[int, tuple[FloatArray, IntArray]] = {}
        #: Jobs that the autoscaler limits to a size below their owner's maximum.
        self.caps: dict[int, Capped] = {}
        self.lost_nodes: set[int] = set()
        self.plans = 0
        self.events_seen = 0
        self._users = {user.name: i for i, user in enumerate(cluster.users)}
        self._decision: Decision | None = None
        self._cut: dict[int, int] = {}
        self._planned_events = 0
        #: Which jobs may run, and how large they may be.
        self.admission = Admission(week_begin_s or 0.0)
        self._counts_use = week_begin_s is not None
        #: Jobs with a priority other than 0.
        self._ranked: set[int] = set()
        #: Jobs whose shares are multiples of a step above 1.
        self._stepped: set[int] = set()
        self._cools_until_s = -np.inf
        #: Jobs that lost GPUs to an event since the last plan, with what they had before.
        self.unplanned: dict[int, Before] = {}

    # -- the cycle ---------------------------------------------------------------------------------

    def step(self, now_s: float, events: Sequence[Event]) -> Plan:
        """Take in the events, decide, and return the changes as a plan."""
        # 1. take in the events, and 2. bring the view up to date
        for event in events:
            self.take_in(event, now_s)
        view = self.view
        view.now_s = now_s
        self._cools_until_s = self._cooling_until(now_s, events) if self.cool_down_s else now_s
        if self._cools_until_s > now_s:
            return self._plan(now_s, NO_CHANGES, self._cools_until_s, {})
        self._share_tickets()
        if self.admission.is_needed(self.cluster):
            return self._plan(now_s, *self._decide_within_limits(now_s))
        return self._plan(now_s, *self._decide(now_s))

    def _decide(self, now_s: float) -> tuple[NDArray[np.int64], float, dict[int, Placement]]:
        """(the changes, when to decide again, the placements of the jobs that change)."""
        view = self.view
        # 3. ask the policy for shares
        decision = self.policy.decide(view, self.supply, now_s)
        decision = checked(self.policy, decision, view, self.supply, now_s)
        if self._stepped:
            decision = in_steps(view, decision, self.supply, self.policy, now_s)
        if self._ranked:
            decision = in_own_order(view, decision, self.supply.gpus_of_type, elastic=self.policy.elastic)
        if self.exploration is not None:
            decision = self._explore(self.exploration, decision, now_s)
        # 4. ask the placement for GPUs, keeping what can be kept
        decision, placed = self._place(decision)
        # 5. compare with what was before the events: the difference is the plan
        changes = view.set_shares(
            decision.gpus, decision.gpu_type, decision.servers, self._moved(placed.placements), now_s
        )
        # 6. emit commands; reasons are read off the same state, see `outcome`
        self._decision, self._cut = decision, placed.cut
        where = self._put(changes, placed.placements) if self.placements or placed.placements else {}
        return changes, decision.wake_s, where

    def _explore(self, exploration: Exploration, decision: Decision, now_s: float) -> Decision:
        """Give jobs other sizes for some steps, where the next decision depends on their speed there."""
        if not self.policy.uses_speeds or decision.placements is not None or decision.servers is not None:
            exploration.stop(self._books(), f"policy {self.policy.name} does not decide by speed", now_s)
            return decision
        return exploration.apply(self._books(), decision, now_s, self.events_seen)

    def _books(self) -> Books:
        from shoal.scheduler.exploration.exploration import Books

        admission = self.admission
        return Books(
            self.view, self.supply, self.jobs, self.profiles, lambda job_id: self._within_cap(job_id).gpus,
            admission.sizes, admission.is_needed(self.cluster), self.cool_down_s,
        )  # fmt: skip

    def _decide_within_limits(self, now_s: float) -> tuple[NDArray[np.int64], float, dict[int, Placement]]:
        """Decide on the jobs that may run. GPUs that a limit reserves in vain are offered to others."""
        admission, view = self.admission, self.view
        barred = set(admission.barred)
        admission.begin()
        before = {j: share_of(view, j, self.placements) for j in view.job_ids[view.gpus > 0].tolist()}
        rates = {j: float(view.rate[had.row]) for j, had in before.items()}
        forced = dict(self.unplanned)
        parts: list[NDArray[np.int64]] = []
        where: dict[int, Placement] = {}
        for _ in range(_OFFERS):
            admission.apply(self, now_s)
            changes, wake_s, moved = self._decide(now_s)
            parts.append(changes)
            where |= moved
            if not admission.offer_again(self, self.supply.total_gpus - int(view.gpus.sum())):
                break
        for job_id in sorted(admission.barred.keys() - barred):
            self.policy.left(job_id, now_s)
        for job_id in sorted(barred - admission.barred.keys()):
            self.policy.joined(job_id, now_s)
        changes = parts[0] if len(parts) == 1 else self._merged(parts, before, forced)
        for job_id in self.unplanned.keys() & before.keys():
            had, now = before[job_id], self._after(job_id)
            if (had.gpus, had.gpu_type, had.placement) == (now.gpus, now.gpu_type, now.placement):
                view.rate[now.row] = rates[job_id]  # it lost its GPUs and got them back: it runs on
        return changes, min(wake_s, admission.wake_s(self, now_s)), where

    def _merged(
        self, parts: Sequence[NDArray[np.int64]], before: dict[int, After], forced: dict[int, Before]
    ) -> NDArray[np.int64]:
        """The changes of several decisions as one. `forced`: of jobs that lost GPUs to the events of this step."""
        touched = {int(line[JOB]) for part in parts for line in part} | self.unplanned.keys()
        self.unplanned = before_all_rounds(touched, before, forced, late=self.unplanned)
        return starts(parts, before, {job_id: self._after(job_id) for job_id in touched})

    def release(self, job_id: int) -> None:
        """Take the GPUs of a job that may not run any more."""
        self._release(self.view.row(job_id), Cause(CauseKind.LIMIT), self.view.now_s)

    def _share_tickets(self) -> None:
        """Divide the tickets of groups among their users who have jobs."""
        if any(g.tickets is not None for g in self.cluster.groups):
            active = {self._users[job.user] for job in self.jobs.values()}
            users = with_shared_tickets(self.cluster, active)
            if users != self.supply.cluster.users:
                self.supply = replace(self.supply, cluster=self.cluster.with_users(users))

    def gpu_seconds_of_week(self, users: Iterable[int], now_s: float) -> float:
        """GPU time that the users with these indexes got this week, by the shares that were decided."""
        if self._counts_use or self.cluster.has_limits:
            self._settle_use(now_s)
        return self.admission.use.of(users)

    def _settle_use(self, now_s: float) -> None:
        self.admission.use.settle(now_s, self.view.gpus, self.view.user, len(self.cluster.users))

    def take_in(self, event: Event, now_s: float) -> None:
        """Take in an event without deciding. The changes that it forces are in the next plan."""
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"not an event: {event!r}")
        if self._counts_use or self.cluster.has_limits:
            self._settle_use(now_s)
        handler(self, event, now_s)
        self.events_seen += 1

    def _place(self, decision: Decision) -> tuple[Decision, Placed]:
        """Place a decision on the nodes. Shares that fit nowhere are cut, and other jobs get what is left."""
        view, policy = self.view, self.policy
        placed = self.placer.place(view, decision, self.supply, self.placements)
        if not placed.cut:
            return decision, placed
        decision, cut = self._cut_to(decision, placed.cut), placed.cut
        need = view.min_gpus if policy.elastic else view.requested_gpus
        for _ in range(_ROUNDS):
            more = give_left_over(view, decision, need, self.supply, cut) if policy.backfills else None
            if more is None:
                break
            again = self.placer.place(view, more, self.supply, self.placements)
            if any(decision.gpus[view.row(job_id)] for job_id in again.cut.keys() - cut.keys()):
                break  # this would take GPUs from a job that the policy chose
            cut = cut | again.cut
            decision, placed = self._cut_to(more, again.cut), again
            if not again.cut:
                break
        return decision, Placed(placed.placements, cut)

    def _cut_to(self, decision: Decision, cut: dict[int, int]) -> Decision:
        gpus = decision.gpus.copy()
        for job_id, got in cut.items():
            gpus[self.view.row(job_id)] = got
        return replace(decision, gpus=gpus)

    def continue_from(self, plans: int, events_seen: int) -> None:
        """Number the next plan and the next event after those of another scheduler."""
        self.plans, self.events_seen, self._planned_events = plans, events_seen, events_seen

    def _plan(
        self, now_s: float, changes: NDArray[np.int64], wake_s: float, where: dict[int, Placement]
    ) -> Plan:
        forced: dict[int, Cause] = {}
        if self.unplanned:
            after = {job_id: self._after(job_id) for job_id in self.unplanned}
            changes = whole_difference(changes, self.unplanned, after)
            where = where | {job_id: now.placement for job_id, now in after.items() if now.placement}
            forced = {job_id: was.cause for job_id, was in self.unplanned.items()}
            self.unplanned = {}
        notes: tuple[TrialNote, ...] = ()
        if self.exploration is not None:
            forced, notes = self.exploration.causes() | forced, self.exploration.take_notes()
        causes = range(self._planned_events, self.events_seen)
        self._planned_events = self.events_seen
        self.plans += 1
        types = self.cluster.gpu_types
        return Plan(self.plans - 1, now_s, changes, wake_s, causes, types, where, forced, notes)

    def _after(self, job_id: int) -> After:
        if job_id in self.view:
            return share_of(self.view, job_id, self.placements)
        _, ints = self.held[job_id] if job_id in self.held else self.admission.barred[job_id]
        return After(-1, int(ints[_GENERATION]))

    def _cooling_until(self, now_s: float, events: Sequence[Event]) -> float:
        """The end of the cool-down: measurements alone do not resize jobs that were just resized."""
        if not events or not all(type(e) is Measured for e in events):
            return now_s
        if self.exploration is not None and self.exploration.is_complete(self._books()):
            return now_s
        running = self.view.gpus > 0
        if not running.any():
            return now_s
        return float(self.view.changed_s[running].max()) + self.cool_down_s

    def _moved(self, placements: dict[int, Placement]) -> NDArray[np.bool_] | None:
        """Which rows change their GPUs; None if none does."""
        if not placements:
            return None
        moved = np.zeros(len(self.view), np.bool_)
        moved[
            [self.view.row(job) for job, at in placements.items() if at != self.placements.get(job, ())]
        ] = True
        return moved

    def _put(self, changes: NDArray[np.int64], moved: dict[int, Placement]) -> dict[int, Placement]:
        """Record the new placements of the jobs that change, and return them."""
        where = {}
        for job, gpus in changes[:, [JOB, GPUS]].tolist():
            placement = (moved.get(job) or self.placements.get(job, ())) if gpus else ()
            if placement:
                where[job] = self.placements[job] = placement
            elif not gpus:
                self.placements.pop(job, None)
        return where

    # -- events ------------------------------------------------------------------------------------

    def _on_submitted(self, event: Submitted, now_s: float) -> None:
        job = event.job
        if job.iterations is None and not self.policy.takes_unknown_lengths:
            raise ShoalError(
                f"job {job.name!r} has no known length, and policy {self.policy.name!r} goes by lengths: "
                "give an estimate, or choose one that does without (afs-p, tiresias-l, fair-afs)"
            )
        user = self.user_index(job.user)
        self.view.add(event.job_id, job, event.profile, user, now_s)
        self.jobs[event.job_id] = job
        self.profiles[event.job_id] = event.profile
        self.note_conditions(event.job_id)
        self.policy.joined(event.job_id, now_s)
        self._forget_old_profiles()

    def note_conditions(self, job_id: int) -> None:
        """Remember that something besides the policy decides on the job."""
        job = self.jobs[job_id]
        if job.has_conditions:
            self.admission.conditional.add(job_id)
        if job.priority:
            self._ranked.add(job_id)
        if job.gpus.step > 1:
            self._stepped.add(job_id)

    def _on_finished(self, event: Finished, now_s: float) -> None:
        self._remove(event.job_id, now_s)
        self.admission.ended(event.job_id, event.succeeded, self.jobs)

    def _on_worker_failed(self, event: WorkerFailed, now_s: float) -> None:
        if self.exploration is not None:
            self.exploration.worker_failed(event.job_id)

    def _on_cancelled(self, event: Cancelled, now_s: float) -> None:
        self._remove(event.job_id, now_s)
        if event.ended:
            self.admission.ended(event.job_id, False, self.jobs)

    def _on_held(self, event: Held, now_s: float) -> None:
        if event.held and event.job_id in self.admission.barred:
            self.held[event.job_id] = self.admission.barred.pop(event.job_id)
        elif event.held and event.job_id in self.view:
            row = self.view.row(event.job_id)
            self._release(row, Cause(CauseKind.HELD, self.events_seen), now_s)
            self.held[event.job_id] = self.view.park(event.job_id)
            self.policy.left(event.job_id, now_s)
        elif not event.held and event.job_id in self.held:
            self.view.unpark(event.job_id, self.held.pop(event.job_id))
            row = self.view.row(event.job_id)
            self.view.changed_s[row] = now_s
            self.update_limits(event.job_id)
            self.policy.joined(event.job_id, now_s)

    def _on_rescaled(self, event: Rescaled, now_s: float) -> None:
        job = self.jobs.get(event.job_id)
        if job is None:
            return  # it has ended meanwhile
        if event.profile is not None:
            self.profiles[event.job_id] = event.profile
        gpus = GpuRange(event.min_gpus, event.max_gpus, job.gpus.step)
        requested = gpus.floor(min(max(event.requested_gpus or job.requested_gpus, gpus.min), gpus.max))
        self.jobs[event.job_id] = replace(job, gpus=gpus, requested_gpus=requested)
        if event.job_id in self.view:
            self.update_limits(event.job_id)

    def _on_measured(self, event: Measured, now_s: float) -> None:
        if event.job_id not in self.jobs:
            return  # it has ended meanwhile
        self.profiles[event.job_id] = event.profile
        if event.job_id in self.view:
            self.update_limits(event.job_id)
            self._forget_old_profiles()

    def _forget_old_profiles(self) -> None:
        """Tables are kept for those in use, not for all that was ever measured: a server runs for months."""
        if self.view.profiles_known > _FEW_PROFILES + 4 * len(self.view):
            self.view.forget_profiles()
            for job_id in self.view.job_ids.tolist():
                self.update_limits(job_id)

    def _on_capped(self, event: Capped, now_s: float) -> None:
        if event.job_id not in self.jobs:
            return  # it has ended meanwhile
        self.caps.pop(event.job_id, None)
        if event.gpus is not None:
            self.caps[event.job_id] = event
        if event.job_id in self.view:
            self.update_limits(event.job_id)

    def update_limits(self, job_id: int) -> None:
        """Let a job's row follow its profile and its range, as far as the autoscaler lets it grow."""
        row, profile = self.view.row(job_id), self.profiles[job_id]
        job = self._within_cap(job_id)
        self.view.step_gpus[row] = job.gpus.step
        self.view.set_profile(row, job, profile)
        self.view.min_gpus[row], self.view.requested_gpus[row] = job.gpus.min, job.requested_gpus
        sizes = self.admission.sizes.get(job_id)
        if sizes is not None:
            self.view.limit_sizes(row, sizes, elastic=self.policy.elastic)

    def _within_cap(self, job_id: int) -> Job:
        """The job with the range that the autoscaler leaves it."""
        job, cap = self.jobs[job_id], self.caps.get(job_id)
        if cap is None or cap.gpus is None or not self.policy.elastic:
            return job
        most = job.gpus.floor(min(max(cap.gpus, job.gpus.min), job.gpus.max))
        held = replace(job, gpus=replace(job.gpus, max=most), requested_gpus=min(job.requested_gpus, most))
        # Where no share up to the cap is faster than ones below the minimum, it cannot be held there.
        return held if self.view.most_useful(held, self.profiles[job_id]) >= job.gpus.min else job

    def most_by_type(self, job_id: int) -> IntArray:
        """By GPU type: the most GPUs that the job can use, without limits of users and groups."""
        return self.view.most_by_type(self._within_cap(job_id), self.profiles[job_id])

    def least_size(self, job_id: int, gpu_type: int) -> int:
        return self.view.least_size(self._within_cap(job_id), self.profiles[job_id], gpu_type)

    def _on_node_lost(self, event: NodeLost, now_s: float) -> None:
        self.lose_nodes([event.node])
        for job_id, placement in list(self.placements.items()):
            if any(node == event.node for node, _ in placement) and job_id in self.view:
                self._lose(self.view.row(job_id), event.node, now_s)

    def _on_node_back(self, event: NodeBack, now_s: float) -> None:
        self.lost_nodes.discard(event.node)
        self.supply = self._supply()

    def _on_tickets_changed(self, event: TicketsChanged, now_s: float) -> None:
        index = self.user_index(event.user)
        users = list(self.cluster.users)
        users[index] = replace(users[index], tickets=event.tickets)
        self.cluster = self.cluster.with_users(users)
        self.supply = self._supply()

    def _on_people_changed(self, event: PeopleChanged, now_s: float) -> None:
        for user in event.users:
            self.user_index(user.name)
        changed = {user.name: user for user in event.users}
        users = tuple(changed.get(user.name, user) for user in self.cluster.users)
        self.cluster = replace(self.cluster, users=users, groups=event.groups)
        self.supply = self._supply()

    def _on_timer(self, event: Timer, now_s: float) -> None:
        pass

    def lose_nodes(self, nodes: Iterable[int]) -> None:
        """These nodes give no GPUs any more."""
        self.lost_nodes.update(nodes)
        self.supply = self._supply()

    def _supply(self) -> Supply:
        whole = Supply.of(self.cluster)
        return whole.without(self.lost_nodes) if self.lost_nodes else whole

    def user_index(self, name: str) -> int:
        """The index of a user; one not seen before joins with one ticket."""
        index = self._users.get(name)
        if index is None:
            index = self._users[name] = len(self.cluster.users)
            self.cluster = self.cluster.with_users([*self.cluster.users, User(name)])
            self.supply = self._supply()
        return index

    def _remove(self, job_id: int, now_s: float) -> None:
        if job_id in self.held or job_id in self.admission.barred:
            self.held.pop(job_id, None)
        elif job_id in self.view:
            self.view.remove(job_id)
            self.policy.left(job_id, now_s)
        else:
            return  # it ended before this scheduler knew of it: a late message, not a mistake
        self.placements.pop(job_id, None)
        self.caps.pop(job_id, None)
        self.unplanned.pop(job_id, None)
        self.admission.forget(job_id)
        self._ranked.discard(job_id)
        self._stepped.discard(job_id)
        del self.jobs[job_id], self.profiles[job_id]

    def revoke(self, job_id: int, node: int | None, now_s: float) -> None:
        """Take all GPUs from a job whose node no longer has them. The next plan contains the command."""
        self._release(self.view.row(job_id), Cause(CauseKind.NODE_LOST, None, node), now_s)

    def _release(self, row: int, cause: Cause, now_s: float) -> None:
        """Take all GPUs from the row, because of an event. `_plan` turns this into a command."""
        view = self.view
        job_id = int(view.job_ids[row])
        if view.gpus[row] and job_id not in self.unplanned:
            had = share_of(view, job_id, self.placements)
            self.unplanned[job_id] = Before(had.gpus, had.gpu_type, had.servers, had.placement, cause)
        view.attained_gpu_s[row] += view.gpus[row] * (now_s - view.changed_s[row])
        view.changed_s[row] = now_s
        view.remaining[row] = view.remaining_now(now_s)[row]
        view.settled_s[row] = now_s
        view.rate[row] = 0.0
        view.gpus[row] = view.servers[row] = 0
        view.gpu_type[row] = -1
        view.generation[row] += 1
        self.placements.pop(job_id, None)

    def _lose(self, row: int, node: int, now_s: float) -> None:
        """Take the row's GPUs on a lost node. The job keeps the others if they are enough for it."""
        job_id = int(self.view.job_ids[row])
        rest = trimmed(self.placements[job_id], node, int(self.view.step_gpus[row]))
        left = sum(g for _, g in rest)
        gpu_type = self.view.gpu_type[row]
        self._release(row, Cause(CauseKind.NODE_LOST, self.events_seen, node), now_s)
        if self.policy.elastic and left >= self.view.min_gpus[row]:
            self.view.gpus[row], self.view.gpu_type[row] = left, gpu_type
            self.view.servers[row] = left * self.view.is_ps[row]
            self.placements[job_id] = rest

    # -- progress ----------------------------------------------------------------------------------

    def observe(self, job_id: int, remaining: float, rate: float, at_s: float) -> None:
        """Set the progress of a job at `at_s` and its speed from then on. Nothing else updates the progress."""
        parked = self.admission.barred.get(job_id) or self.held.get(job_id)
        if parked is not None:
            parked[0][_PROGRESS] = remaining, rate, at_s
            return
        row, view = self.view.row(job_id), self.view.cells
        view.remaining[row] = remaining
        view.rate[row] = rate
        view.settled_s[row] = at_s

    def go_on(self, plan: Plan) -> FloatArray:
        """Assume that the plan was carried out at once. Returns when each job that changed ends at its known speed."""
        return self.view.go_on(plan.changes, plan.now_s)

    # -- explanations ------------------------------------------------------------------------------

    def outcome(self, job_id: int, now_s: float) -> Outcome:
        """What the last plan means for a job, and why it does not have all it could use."""
        situation = Situation(self.view, self.policy, self.supply, self._cut, self._decision, now_s)
        job, obstacle = self.jobs[job_id], self.admission.obstacles.get(job_id)
        if job_id not in self.view:
            wish = job.gpus.max if self.policy.elastic else job.requested_gpus
            reason = situation.held(job) if job_id in self.held else reason_of(self, job_id, obstacle, now_s)
            return Outcome(job_id, NO_SHARE, wish, reason)
        row = self.view.row(job_id)
        gpus = int(self.view.gpus[row])
        wish = int(self.policy.wish_gpus(self.view)[row])
        share = NO_SHARE
        if gpus:
            share = Share(gpus, self.cluster.gpu_types[self.view.gpu_type[row]], int(self.view.servers[row]))
        measuring = self.exploration and self.exploration.reason(job_id, self.cluster.gpu_types)
        if measuring:
            return Outcome(job_id, share, wish, measuring)
        if gpus < wish:
            found: Reason | None = self._cooling(explain(situation, row), now_s)
        elif obstacle is not None and gpus:
            found = reason_of(self, job_id, obstacle, now_s)
        else:
            found = held_by_autoscaler(job, gpus, self.caps.get(job_id), self.policy)
        if found is not None and self.exploration is not None:
            found = self.exploration.with_failures(found, job, share.gpu_type)
        return Outcome(job_id, share, wish, found)

    def measured_next(self, job_id: int, now_s: float) -> Outlook:
        """Where exploration would measure a job next."""
        from shoal.scheduler.exploration.outlook import Outlook, outlook

        if job_id not in self.view:
            return Outlook(None, "nothing while it has no GPUs")
        return outlook(self.exploration, self._books(), self.policy, job_id, now_s)

    def _cooling(self, reason: Reason, now_s: float) -> Reason:
        """The reason, unless the job could grow and only waits for the end of the cool-down."""
        wait_s = self._cools_until_s - now_s
        if reason.code is not Code.NOT_WORTH_IT or not wait_s > 0 or not reason.evidence.get("free_gpus"):
            return reason
        text = f"jobs were just resized; new measurements are decided on in {wait_s:.0f} s"
        return Reason(Code.COOL_DOWN, text, {**reason.evidence, "wait_s": wait_s})

    def outcomes(self, now_s: float) -> Iterable[Outcome]:
        """The outcome of every active job, in order of submission."""
        for job_id in sorted(self.jobs):
            yield self.outcome(job_id, now_s)


_HANDLERS: dict[type[Any], Callable[[Scheduler, Any, float], None]] = {
    Submitted: Scheduler._on_submitted,
    Finished: Scheduler._on_finished,
    WorkerFailed: Scheduler._on_worker_failed,
    Cancelled: Scheduler._on_cancelled,
    Held: Scheduler._on_held,
    Rescaled: Scheduler._on_rescaled,
    Measured: Scheduler._on_measured,
    Capped: Scheduler._on_capped,
    NodeLost: Scheduler._on_node_lost,
    NodeBack: Scheduler._on_node_back,
    TicketsChanged: Scheduler._on_tickets_changed,
    PeopleChanged: Scheduler._on_people_changed,
    Timer: Scheduler._on_timer,
}
