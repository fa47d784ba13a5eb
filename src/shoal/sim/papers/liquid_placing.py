"""Liquid's placement compared with others: jobs of one server and two workers on nodes with a few GPUs.

A job takes the seconds that Liquid measured for its layout (`placement.ps_speed.LAYOUT_TIME_S`), times a random
factor from 0.95 to 0.99, as in the authors' mock. Immediate mode places each job when it reaches the head of the
queue. Batch mode places the jobs that fit (at most five) together, every 5 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster
from shoal.placement.best_fit import BestFit, best_fit
from shoal.placement.grouping_ga import Search, place_batch
from shoal.placement.liquid_score import ContainerPlacement, Containers
from shoal.placement.ps_speed import LAYOUT_TIME_S, LAYOUTS, layout, layout_time_s

IntArray = NDArray[np.int32]
Rng = np.random.Generator
#: Chooses nodes for three containers (the server first), given the free GPUs of each node.
Pick = Callable[[IntArray, Rng], list[int]]

#: Eight jobs in the order of the authors' launcher.
LAUNCH = (
    "inception3", "resnet50", "resnet50", "vgg16", "resnet50", "inception3", "resnet50", "vgg16",
)  # fmt: skip
JOB = Containers(ps=1, workers=2)
LOCAL_NODES, LOCAL_GPUS, CLOUD_GPUS = 5, 4, 2
BATCH_S = 5.0
PARALLEL = 5


def pick_random(free: IntArray, rng: Rng) -> list[int]:
    """A random free GPU for each container."""
    gpus = np.repeat(np.arange(len(free)), free)
    return [int(node) for node in rng.permutation(gpus)[: JOB.total]]


def pick_even(free: IntArray, rng: Rng) -> list[int]:
    """Each container goes to the node with the most free GPUs, so containers are spread as far as possible."""
    free = free.copy()
    nodes: list[int] = []
    for _ in range(JOB.total):
        nodes.append(int(np.argmax(free)))
        free[nodes[-1]] -= 1
    return nodes


def pick_kubernetes(free: IntArray, rng: Rng) -> list[int]:
    """Like the default scheduler of Kubernetes: the least used node, ties at random, pods in random order."""
    free = free.copy()
    nodes: list[int] = []
    for _ in range(JOB.total):
        best = np.flatnonzero(free == free.max())
        nodes.append(int(rng.choice(best)))
        free[nodes[-1]] -= 1
    return [int(node) for node in rng.permutation(nodes)]


def pick_hived(free: IntArray, rng: Rng) -> list[int]:
    """Like HiveD: the fullest node that holds the job, else as few nodes as possible.

    HiveD knows cells of GPUs, not the roles of containers, so the containers are assigned at random.
    """
    free = free.copy()
    nodes: list[int] = []
    while len(nodes) < JOB.total:
        want = JOB.total - len(nodes)
        holds = np.where(free >= min(want, free.max()), free, 99)
        node = int(np.argmin(holds))
        take = min(want, int(free[node]))
        nodes += [node] * take
        free[node] -= take
    return [int(node) for node in rng.permutation(nodes)]


def pick_liquid(cluster: Cluster, variant: BestFit) -> Pick:
    def pick(free: IntArray, rng: Rng) -> list[int]:
        spot = best_fit(cluster, JOB, cluster.gpus_of_node - free, variant=variant)
        assert isinstance(spot, ContainerPlacement)
        return [*spot.ps_nodes, *spot.worker_nodes]

    return pick


def strategies(cluster: Cluster) -> dict[str, Pick]:
    return {
        "liquid": pick_liquid(cluster, BestFit.AUTHORS_CODE),
        "liquid, as printed": pick_liquid(cluster, BestFit.REMOVE_FULL),
        "random": pick_random,
        "even": pick_even,
        "kubernetes": pick_kubernetes,
        "hived": pick_hived,
    }


@dataclass(slots=True)
class _Run:
    """One queue of jobs on one cluster."""

    free: IntArray
    queue: list[str]
    rng: Rng
    running: list[tuple[float, list[int]]]
    took_s: dict[str, list[float]]
    finish_s: list[float]
    layouts: dict[str, int]

    def start(self, now_s: float, model: str, nodes: list[int]) -> None:
        np.subtract.at(self.free, nodes, 1)
        assert self.free.min() >= 0
        name = layout(nodes[:1], nodes[1:])
        took_s = layout_time_s(model, nodes[:1], nodes[1:]) * float(self.rng.uniform(0.95, 0.99))
        self.layouts[name] = self.layouts.get(name, 0) + 1
        self.running.append((now_s + took_s, nodes))
        self.took_s.setdefault(model, []).append(took_s)
        self.finish_s.append(now_s + took_s)

    def end_next(self) -> float:
        """End the next job, and return the time."""
        self.running.sort(key=lambda r: -r[0])
        end_s, nodes = self.running.pop()
        np.add.at(self.free, nodes, 1)
        return end_s

    def figures(self) -> dict[str, Any]:
        return {
            "execution_s": {model: float(np.mean(took)) for model, took in sorted(self.took_s.items())},
            "jct_s": float(np.mean(self.finish_s)),
            "makespan_s": max(self.finish_s),
            "layouts": self.layouts,
        }


def _fresh(nodes: int, gpus: int, rng: Rng, jobs: int) -> tuple[Cluster, _Run]:
    cluster = Cluster.of(nodes, gpus)
    queue = [LAUNCH[i % len(LAUNCH)] for i in range(jobs)]
    return cluster, _Run(cluster.gpus_of_node.copy(), queue, rng, [], {}, [], {})


def immediate(nodes: int, gpus: int, jobs: int, strategy: str, rng: Rng) -> dict[str, Any]:
    """All jobs wait from the start; each is placed as soon as three GPUs are free."""
    cluster, run = _fresh(nodes, gpus, rng, jobs)
    pick, now_s = strategies(cluster)[strategy], 0.0
    while run.queue:
        while run.free.sum() < JOB.total:
            now_s = run.end_next()
        run.start(now_s, run.queue.pop(0), pick(run.free, rng))
    return run.figures()


def batch(nodes: int, rng: Rng, search: Search) -> dict[str, Any]:
    """Every few seconds, the search places the jobs at the head of the queue that fit together."""
    cluster, run = _fresh(nodes, CLOUD_GPUS, rng, len(LAUNCH) * nodes // 5)
    now_s = 0.0
    while run.queue:
        count = min(PARALLEL, len(run.queue), int(run.free.sum()) // JOB.total)
        if count == 0:
            end_s = run.end_next()
            now_s = BATCH_S * np.ceil(end_s / BATCH_S)
            while run.running and min(r[0] for r in run.running) <= now_s:
                run.end_next()
            continue
        plan = place_batch(cluster, [JOB] * count, cluster.gpus_of_node - run.free, rng, search)
        for spot in plan.spots:
            assert isinstance(spot, ContainerPlacement)
            run.start(now_s, run.queue.pop(0), [*spot.ps_nodes, *spot.worker_nodes])
    return run.figures()


def mean_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    mean: dict[str, Any] = {key: float(np.mean([r[key] for r in runs])) for key in ("jct_s", "makespan_s")}
    mean["execution_s"] = {
        model: float(np.mean([r["execution_s"][model] for r in runs])) for model in runs[0]["execution_s"]
    }
    mean["layouts"] = {
        name: sum(r["layouts"].get(name, 0) for r in runs) / sum(sum(r["layouts"].values()) for r in runs)
        for name in LAYOUTS
    }
    return mean


def bounds() -> dict[str, dict[str, float]]:
    """The largest possible gain with the published times, in per cent: all jobs in one layout against another.

    Nodes with four GPUs hold a whole job (pww): mean over the kinds of job, as in the paper. Nodes with two GPUs
    do not (pw:w): mean over jobs.
    """
    kinds = list(LAYOUT_TIME_S.values())
    four = {
        name: float(np.mean([100 * (1 - t["pww"] / t[name]) for t in kinds])) for name in ("p:w:w", "p:ww")
    }
    mean = {name: float(np.mean([LAYOUT_TIME_S[m][name] for m in LAUNCH])) for name in LAYOUTS}
    two = {name: 100 * (1 - mean["pw:w"] / mean[name]) for name in ("p:w:w", "p:ww")}
    return {"four_gpus": four, "two_gpus": two}
