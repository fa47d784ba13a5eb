"""The default placement on nodes: keep running jobs in place, and pack new ones.

A job whose share does not change stays where it is. A job that shrinks gives up the nodes on which it has
the fewest GPUs. A job that grows takes free GPUs on its own nodes first, then on as few other nodes as
possible, preferably in the same rack. A job that starts takes the node with the fewest free GPUs that holds
it, else as few nodes as possible; larger jobs choose first. This keeps empty nodes free for jobs that need
whole nodes. Running jobs are never moved: `moving_placer` does that.

With `whole_nodes`, a share stays within one node or takes whole nodes, so that at most one multi-node job
uses a node's network (CoDDL's packing, NSDI'21). A share that cannot be placed this way is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster
from shoal.core.decision import Decision
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.placement import pack
from shoal.placement.placer import Placed

IntArray = NDArray[np.int32]
#: GPUs of one job by node.
Held = dict[int, int]


@dataclass(slots=True)
class Request:
    """A job that should have `want` GPUs of a type and has `held` so far."""

    row: int
    job_id: int
    want: int
    min_gpus: int
    gpu_type: int
    held: Held
    #: The placement chosen by the policy itself, if any.
    given: Placement | None = None
    step: int = 1

    @property
    def missing(self) -> int:
        return self.want - sum(self.held.values())


class KeepAndPack:
    """A `Placer`. State kept between calls is only a cache: the result depends on the arguments alone.

    `view.gpus` and `current` must describe the same shares.

    whole_nodes: CoDDL's rule, see above.
    all_or_nothing: a share that does not fit as decided is cut to 0 instead of to what fits. This is for
    policies that do not resize. Otherwise a running job that cannot grow keeps its GPUs.
    """

    def __init__(self, *, whole_nodes: bool = False, all_or_nothing: bool = False) -> None:
        self.whole_nodes = whole_nodes
        self.grows_in_place = not whole_nodes
        self.all_or_nothing = all_or_nothing
        self._cluster: Cluster | None = None
        self._known: dict[int, Placement] = {}
        self._up: IntArray = np.zeros(0, np.int32)
        self._free: IntArray = np.zeros(0, np.int32)

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        self._sync(supply, current)
        requests = self._changed(view, decision, current)
        for request in requests.values():
            if request.given is not None or request.want == 0 or self._is_of_other_type(request):
                self._release(request.held)
            elif request.missing < 0:
                self._shrink(request)
        for request in requests.values():
            for node, gpus in request.given or ():
                self._give(request.held, node, gpus)
        if self._free.min() < 0:
            self._evict(requests, view, decision, current)
        growing = [r for r in requests.values() if r.missing > 0 and r.given is None]
        for request in growing:
            if request.held and self.grows_in_place:
                self._grow_in_place(request)
        growing.sort(key=self._turn)
        self._place_growing(growing)
        return self._answer(requests.values(), current)

    # Free GPUs

    def _sync(self, supply: Supply, current: dict[int, Placement]) -> None:
        """Update the free GPUs of each node: by the jobs that left since the last call, or from scratch."""
        if supply.cluster is not self._cluster:
            self._cluster = supply.cluster
            self._types = self._cluster.type_of_node
            self._racks = self._cluster.rack_of_node
            self._domains = self._cluster.domain_of_node
            self._known = {}
            self._up = np.zeros(0, np.int32)
        known = self._known
        if np.array_equal(self._up, supply.gpus_of_node):
            for job_id in known.keys() - current.keys():
                for node, gpus in known.pop(job_id):
                    self._free[node] += gpus
            if known == current:
                return
        self._up = supply.gpus_of_node.copy()
        self._free = self._up.astype(np.int32)
        for placement in current.values():
            for node, gpus in placement:
                self._free[node] -= gpus
        self._known = dict(current)

    def _changed(self, view: View, decision: Decision, current: dict[int, Placement]) -> dict[int, Request]:
        """Requests by job id, for the rows whose share, type or given placement differs from the current one."""
        have = view.gpus
        if int(have.sum()) != int(self._up.sum() - self._free.sum()):
            # A job lost a node, or a share was never placed: check every job.
            have = np.array([sum(g for _, g in current.get(int(j), ())) for j in view.job_ids], np.int32)
        changed = decision.gpus != have
        if decision.gpu_type is not None:
            changed |= (decision.gpu_type != view.gpu_type) & (decision.gpus > 0)
        rows = np.flatnonzero(changed).tolist()
        given = decision.placements or {}
        rows += [r for r, p in given.items() if not changed[r] and p != current.get(int(view.job_ids[r]), ())]
        requests = {}
        for row in sorted(rows):
            request = self._request(row, view, decision, current)
            requests[request.job_id] = request
        return requests

    def _request(self, row: int, view: View, decision: Decision, current: dict[int, Placement]) -> Request:
        job_id = int(view.job_ids[row])
        held = dict(current.get(job_id, ()))
        given = (decision.placements or {}).get(row)
        want = int(decision.gpus[row]) if given is None else sum(gpus for _, gpus in given)
        if decision.gpu_type is not None:
            gpu_type = int(decision.gpu_type[row])
        else:
            gpu_type = -1 if len(view.gpu_types) == 1 else self._any_type(view, row, held)
        least, step = int(view.min_gpus[row]), int(view.step_gpus[row])
        return Request(row, job_id, want, least, gpu_type, held, given, step)

    def _is_of_other_type(self, request: Request) -> bool:
        return request.gpu_type >= 0 and any(self._types[n] != request.gpu_type for n in request.held)

    def _any_type(self, view: View, row: int, held: Held) -> int:
        """The GPU type of a share: the one it has, else the usable type with the most free GPUs."""
        if held:
            return int(self._types[next(iter(held))])
        free = np.bincount(self._types, weights=np.maximum(self._free, 0), minlength=len(view.gpu_types))
        return int(np.argmax(np.where(view.type_max[:, row] > 0, free, -1)))

    # Releasing GPUs

    def _release(self, held: Held) -> None:
        for node, gpus in held.items():
            self._free[node] += gpus
        held.clear()

    def _shrink(self, request: Request) -> None:
        """Give up GPUs where the job has the fewest first, so that it ends on fewer nodes."""
        if self.whole_nodes and len(request.held) > 1:
            # The rest must again be whole nodes or one node: place it again, on its own nodes first.
            self._regroup(request)
        else:
            self._give_up(request, -request.missing)

    def _give_up(self, request: Request, surplus: int) -> None:
        held = request.held
        for node in sorted(held, key=lambda n: (held[n], -n)):
            give = min(surplus, held[node])
            self._give(held, node, -give)
            surplus -= give
            if surplus == 0:
                break

    def _give(self, held: Held, node: int, gpus: int) -> None:
        held[node] = held.get(node, 0) + gpus
        self._free[node] -= gpus
        if held[node] == 0:
            del held[node]

    def _evict(
        self,
        requests: dict[int, Request],
        view: View,
        decision: Decision,
        current: dict[int, Placement],
    ) -> None:
        """Take GPUs from jobs on overcommitted nodes: lost nodes, or nodes for which the policy gave placements.

        The youngest jobs lose GPUs first, jobs placed by the policy last. A job that lost GPUs requests
        them again elsewhere.
        """
        over = {int(n) for n in np.flatnonzero(self._free < 0)}
        on_them: list[tuple[bool, int, Request]] = []
        for job_id in dict.fromkeys([*current, *requests]):
            request = requests.get(job_id)
            if over.intersection(request.held if request else (n for n, _ in current[job_id])):
                request = request or self._request(view.row(job_id), view, decision, current)
                on_them.append((request.given is not None, -job_id, request))
        for _, _, request in sorted(on_them, key=lambda x: x[:2]):
            for node in over.intersection(request.held):
                if self._free[node] < 0:
                    requests[request.job_id] = request
                    self._give(request.held, node, -min(request.held[node], -int(self._free[node])))

    # Taking GPUs

    def _turn(self, request: Request) -> tuple[int, int]:
        """Sort key: the request that misses the most GPUs chooses first."""
        return -request.missing, request.row

    def _grow_in_place(self, request: Request) -> None:
        """Take free GPUs on the job's own nodes, starting where it has the most."""
        held = request.held
        for node in sorted(held, key=lambda n: (-held[n], n)):
            take = min(request.missing, int(self._free[node]))
            if take > 0:
                self._give(held, node, take)

    def _place_growing(self, growing: list[Request]) -> None:
        """Place the requests in order."""
        for request in growing:
            if request.missing > 0:
                self._place_rest(request)
            if request.missing > 0 and self.all_or_nothing:
                self._release(request.held)

    def _place_rest(self, request: Request) -> None:
        if self.whole_nodes:
            self._regroup(request)
            return
        near = -1
        if request.held:
            near = int(self._racks[max(request.held, key=lambda n: (request.held[n], -n))])
        chosen = pack.choose(
            self._free,
            self._types,
            request.gpu_type,
            request.missing,
            self._racks,
            self._domains,
            near,
        )
        for node, take in chosen.tolist():
            self._give(request.held, node, take)

    def _regroup(self, request: Request) -> None:
        """Place the whole share again, within one node or on whole nodes, on its own nodes if possible."""
        before = dict(request.held)
        kept = sum(before.values())
        self._release(request.held)
        best: Held = {}
        for share in range(request.want, 0, -request.step):
            best = self._within_rule(share, request.gpu_type, before)
            if best:
                break
        if kept <= request.want and sum(best.values()) <= kept:
            best = before  # no gain: keep the placement
        for node, gpus in best.items():
            self._give(request.held, node, gpus)

    def _within_rule(self, share: int, gpu_type: int, before: Held) -> Held:
        """GPUs by node that hold exactly `share` under the rule, own nodes first; empty if there are none."""
        avail = pack.available(self._free, self._types, gpu_type)
        own = np.zeros_like(avail)
        own[list(before)] = avail[list(before)]
        for choice in (own, avail):
            node = pack.best_node(choice, share, self._racks, -1)
            if node >= 0:
                return {node: share}
            taken = pack.whole_nodes(choice, self._up, share, self._racks, self._domains)
            if taken.sum() == share:
                return {n: int(taken[n]) for n in np.flatnonzero(taken).tolist()}
        return {}

    # The result

    def _answer(self, requests: Iterable[Request], current: dict[int, Placement]) -> Placed:
        placements: dict[int, Placement] = {}
        cut: dict[int, int] = {}
        for request in requests:
            got = request.want - request.missing
            if got < request.want and got % request.step:
                self._give_up(request, got % request.step)
                got -= got % request.step
            if 0 < got < request.min_gpus and got < request.want:
                self._release(request.held)  # never a partial gang
                got = 0
            if got < request.want:
                cut[request.job_id] = got
            placement = tuple(sorted(request.held.items()))
            if placement != current.get(request.job_id, ()):
                placements[request.job_id] = placement
                if placement:
                    self._known[request.job_id] = placement
                else:
                    self._known.pop(request.job_id, None)
        return Placed(placements, cut)
