"""Random claims of users on a few nodes, and how far users end from their shares under gandiva-fair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from possible import fraction_for_all

from shoal.core.cluster import Cluster, User
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.registry import make_policy, policy_class

ANY = Profile.of("any", {g: 1.0 / g for g in range(1, 17)})
CLAIMS = {
    "4 nodes of 4, 18 to 39 jobs of 1, 2 or 4": ((4,), (4,), (1, 2, 4), (18, 40), 4),
    "2 to 6 nodes of 4 or 8, gangs of 1, 2, 4, .. within a node": (
        (2, 3, 4, 6),
        (4, 8),
        (1, 2, 4, 8),
        (6, 30),
        6,
    ),
    "the same, gangs of any size within a node": ((2, 3, 4, 6), (4, 8), tuple(range(1, 9)), (6, 30), 6),
    "the same, gangs of 1, 2, 4, 8, 12 or 16, that may span nodes": (
        (2, 3, 4, 6),
        (4, 8),
        (1, 2, 4, 8, 12, 16),
        (6, 30),
        6,
    ),
    "24 or 32 nodes of 4 or 8, 100 to 299 jobs of the same gangs": (
        (24, 32),
        (4, 8),
        (1, 2, 4, 8, 12, 16),
        (100, 300),
        12,
    ),
}
#: On more nodes than these the linear program takes too long.
MOST_NODES = 8


#: Of the shares that a schedule could give to all users at once, less than this is not feasible: over 720 quanta the
#: rest is about one quantum's work.
FEASIBLE = 0.999
#: A job starves if it waits for more turns than this. A turn is the mean time between two quanta of a job that
#: receives its due.
MOST_TURNS = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one claim. Distances are in quanta of all GPUs."""

    seed: int
    #: The largest distance of a user from its share of the GPU time in use: at the end, and at any time.
    end_off: float
    ever_off: float
    #: The longest wait of a job in turns, the part of the GPU time that jobs could use and that was used, and the
    #: number of migrations.
    turns: float
    used: float
    migrations: int
    #: If a user is too far off at the end: the part of their shares that all users could have had. None if unknown,
    #: on many nodes.
    possible: float | None = 1.0

    @property
    def feasible(self) -> bool:
        return self.possible is None or self.possible >= FEASIBLE


class Claim:
    """Random users, tickets, jobs and nodes, and what each user received so far."""

    quantum_s = 60.0

    def __init__(self, seed: int, kind: str) -> None:
        counts, widths, sizes, jobs, most_users = CLAIMS[kind]
        rng = np.random.default_rng(seed)
        gpus, users = int(rng.choice(widths)), int(rng.integers(2, most_users + 1))
        owners = tuple(User(f"u{k}", float(rng.integers(1, 4))) for k in range(users))
        self.seed = seed
        self.cluster = Cluster.of(int(rng.choice(counts)), gpus).with_users(owners)
        self.view = View(
            self.cluster.gpu_types, self.cluster.total_gpus, policy_class("gandiva-fair").columns
        )
        fitting = [s for s in sizes if s <= (self.cluster.total_gpus if max(sizes) > max(widths) else gpus)]
        for i in range(int(rng.integers(*jobs))):
            size = int(rng.choice(fitting))
            job = Job(f"j{i}", 0.0, GpuRange(size, size), size, iterations=1e9)
            self.view.add(i, job, ANY, int(rng.integers(users)), 0.0)
        self.had = np.zeros(users)
        self.ever_off, self.turns, self.quanta = 0.0, 0.0, 0

    @property
    def off(self) -> NDArray[np.float64]:
        """Distance of each user from its share of the GPU time in use, in quanta of all GPUs."""
        return self.had - self.share / self.share.sum() * self.had.sum()

    def run_quantum(self, gpus: NDArray[np.int32], share: NDArray[np.float64]) -> None:
        """Jobs have these GPUs for a quantum, and users these shares."""
        view, now_s = self.view, self.quanta * self.quantum_s
        view.changed_s[gpus != view.gpus] = now_s
        view.first_start_s[gpus > 0] = np.minimum(view.first_start_s[gpus > 0], now_s)
        view.gpus[:] = gpus
        view.gpu_type[:] = np.where(gpus > 0, 0, -1)
        np.add.at(self.had, view.user, gpus / self.cluster.total_gpus)
        self.share, self.quanta = share, self.quanta + 1
        self.ever_off = max(self.ever_off, float(np.abs(self.off).max()))
        waited_s = np.where(gpus == 0, now_s + self.quantum_s - view.changed_s, 0.0)
        waited_turns = waited_s * view.column("due_gpus") / (view.requested_gpus * self.quantum_s)
        self.turns = max(self.turns, float(waited_turns.max()))

    def found(self, migrations: int = 0) -> Found:
        end_off = float(np.abs(self.off).max())
        possible: float | None = 1.0
        if end_off > 1.0:
            few = len(self.cluster.nodes) <= MOST_NODES
            possible = self.possible_fraction() if few else None
        demand = min(float(self.view.requested_gpus.sum()) / self.cluster.total_gpus, 1.0)
        used = float(self.had.sum() / self.quanta / demand)
        return Found(self.seed, end_off, self.ever_off, self.turns, used, migrations, possible)

    def possible_fraction(self) -> float:
        """The part of their shares that all users can have at once, with no wait longer than nine turns."""
        user, size = self.view.user.tolist(), self.view.requested_gpus.tolist()
        due = self.view.column("due_gpus").tolist()
        floor = {(u, s): d / s / 9 for u, s, d in zip(user, size, due)}
        nodes = self.cluster.nodes
        return fraction_for_all(
            list(zip(user, size)), len(nodes), nodes[0].gpus, self.share, lambda u, s: floor[u, s]
        )


def gandiva_fair(seed: int, kind: str, hours: float) -> Found:
    """A claim under gandiva-fair."""
    it = Claim(seed, kind)
    policy, supply = make_policy("gandiva-fair"), Supply.of(it.cluster)
    for _ in range(round(hours * 3600.0 / it.quantum_s)):
        decision = policy.decide(it.view, supply, it.quanta * it.quantum_s)
        it.run_quantum(decision.gpus, policy.entitled().sum(axis=1))
    return it.found(policy.report()["migrations"])
