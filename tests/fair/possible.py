"""What any schedule could give: the largest fraction of their parts that all users can have at once.

In every quantum some *full packing* runs: gangs on nodes, wherever they fit best, that leave no GPUs idle on which
another gang would fit. Over time a schedule is a mixture of packings. The linear program

    largest f  with  sum_p x_p gpus[p, u] >= f part[u],   sum_p x_p runs[p, k] >= floor[k],   sum_p x_p = 1, x >= 0

has one column per packing; columns are found as they are needed, by an integer program that looks for the packing
of most worth at the present prices (Gilmore & Gomory 1961). `floor` keeps every job from starving: one run in so
many turns.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp


class Packings:
    """All full packings of gangs, as {(user, size): how many}, on nodes of equal size."""

    def __init__(self, gangs, nodes, gpus):
        self.kinds = sorted(gangs)
        self.count = np.array([gangs[k] for k in self.kinds])
        self.size = np.array([size for _, size in self.kinds])
        kinds = len(self.kinds)
        # Variables: how many of each kind run; whether all do; how many run on each node (GPUs, of one that spans).
        self.variables = kinds * (2 + nodes)
        spans = self.size > gpus
        rows, low, high = [], [], []

        def hold(terms, least, most):
            row = np.zeros(self.variables)
            for at, factor in terms:
                row[at] += factor
            rows.append(row)
            low.append(least)
            high.append(most)

        def on(k, s):
            return 2 * kinds + k * nodes + s

        used = [[(on(k, s), 1 if spans[k] else self.size[k]) for k in range(kinds)] for s in range(nodes)]
        for s in range(nodes):
            hold(used[s], 0, gpus)
        for k in range(kinds):
            each = -self.size[k] if spans[k] else -1
            hold([(k, each), *((on(k, s), 1) for s in range(nodes))], 0, 0)
            hold([(k, 1), (kinds + k, -self.count[k])], 0, np.inf)
            if spans[k]:
                idle = [term for node in used for term in node]
                hold([*idle, (kinds + k, gpus * nodes)], gpus * nodes - self.size[k] + 1, np.inf)
            else:
                for s in range(nodes):
                    hold([*used[s], (kinds + k, gpus)], gpus - self.size[k] + 1, np.inf)
        self.constraints = LinearConstraint(np.array(rows), low, high)
        most = np.concatenate([self.count, np.ones(kinds), np.full(kinds * nodes, gpus)])
        self.bounds = Bounds(np.zeros(self.variables), most)

    def best(self, worth):
        """How many of each kind run in the packing of most worth, a run of kind k being worth[k]."""
        cost = np.zeros(self.variables)
        cost[: len(self.kinds)] = -np.asarray(worth)
        found = milp(
            cost, constraints=self.constraints, integrality=np.ones(self.variables), bounds=self.bounds
        )
        return np.rint(found.x[: len(self.kinds)])


def fraction_for_all(jobs, nodes, gpus, part, floor_of=None):
    """The fraction f for `jobs` [(user, size)], each kind of which (user, size) runs floor_of(user, size) at least."""
    packings = Packings(Counter(jobs), nodes, gpus)
    kinds, part = packings.kinds, np.asarray(part, float)
    users = sorted({user for user, _ in jobs})
    gpus_of = np.array([[size if owner == u else 0 for owner, size in kinds] for u in users])
    floor = np.array([n * floor_of(*k) if floor_of else 0.0 for k, n in zip(kinds, packings.count)])
    columns = [packings.best(packings.size)]
    while True:
        runs = np.array(columns).T
        n, m = runs.shape[1], len(users)
        needs = np.zeros((m + len(kinds), n + 2))  # the mixture, f, and what the floors are missed by
        needs[:m, :n], needs[:m, n] = -gpus_of @ runs, part[users]
        needs[m:, :n], needs[m:, n + 1] = -runs, -1.0
        found = linprog(
            [*np.zeros(n), -1.0, 1e3],
            A_ub=needs,
            b_ub=np.concatenate([np.zeros(m), -floor]),
            A_eq=[[*np.ones(n), 0.0, 0.0]],
            b_eq=[1.0],
        )
        price = -found.ineqlin.marginals
        worth = price[:m] @ gpus_of + price[m:]
        column = packings.best(worth)
        if worth @ column <= -found.eqlin.marginals[0] + 1e-7:
            return float(found.x[n])
        columns.append(column)
