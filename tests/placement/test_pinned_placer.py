"""Suspended processes continue on their own nodes or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster, User
from shoal.core.decision import Decision
from shoal.core.job import GpuRange, Job
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.pinned_placer import PinnedPlacer
from shoal.server.loop.learning import fixed_profile

CLUSTER = Cluster.of(3, 2).with_users([User("ann")])


def place(
    wants: dict[int, int],
    pins: dict[int, Placement],
    current: dict[int, Placement],
    lost: set[int] | None = None,
) -> tuple[dict[int, Placement], dict[int, int]]:
    view = View(CLUSTER.gpu_types, CLUSTER.total_gpus, ())
    profile = fixed_profile("fixed", 2)
    for job_id in wants:
        row = view.add(job_id, Job(f"j{job_id}", 0.0, GpuRange(1, 2), 2), profile, 0, 0.0)
        view.gpus[row] = sum(gpus for _, gpus in current.get(job_id, ()))
    gpus = np.zeros(len(wants), np.int32)
    for job_id, want in wants.items():
        gpus[view.row(job_id)] = want
    supply = Supply.of(CLUSTER).without(lost or set())
    placed = PinnedPlacer(KeepAndPack(all_or_nothing=True), lambda: pins).place(
        view, Decision(gpus), supply, current
    )
    return placed.placements, placed.cut


@pytest.mark.parametrize(
    ("name", "wants", "pins", "current", "lost", "placements", "cut"),
    [
        ("its node has room", {1: 2}, {1: ((2, 2),)}, {}, None, {1: ((2, 2),)}, {}),
        ("its node is taken", {1: 2, 2: 2}, {1: ((0, 2),)}, {2: ((0, 2),)}, None, {}, {1: 0}),
        ("who is there leaves", {1: 2, 2: 0}, {1: ((0, 2),)}, {2: ((0, 2),)}, None, {1: ((0, 2),), 2: ()}, {}),
        ("its node is out of use", {1: 2}, {1: ((0, 2),)}, {}, {0}, {}, {1: 0}),
        ("a part of it is taken", {1: 2, 2: 1}, {1: ((0, 1), (1, 1))}, {2: ((1, 1),)}, None,
         {1: ((0, 1), (1, 1))}, {}),
        ("two on one node", {1: 2, 2: 2}, {1: ((0, 2),), 2: ((0, 2),)}, {}, None, {1: ((0, 2),)}, {2: 0}),
    ],
)  # fmt: skip
def test_a_pinned_job_goes_to_its_own_nodes_or_nowhere(
    name: str,
    wants: dict[int, int],
    pins: dict[int, Placement],
    current: dict[int, Placement],
    lost: set[int] | None,
    placements: dict[int, Placement],
    cut: dict[int, int],
) -> None:
    found, found_cut = place(wants, pins, current, lost)
    assert ({i: p for i, p in found.items() if p}, found_cut) == (
        {i: p for i, p in placements.items() if p},
        cut,
    )


def test_others_are_placed_around_it() -> None:
    found, cut = place({1: 2, 2: 2, 3: 2}, {1: ((0, 2),)}, {})
    assert found[1] == ((0, 2),)
    assert {found[2], found[3]} == {((1, 2),), ((2, 2),)}
    assert not cut
