"""Placements by name: all of them safe in a whole run, each true to its rule, and mistakes answered plainly."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from shoal.core import named
from shoal.core.cluster import Cluster, Node
from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.placement import registry
from shoal.placement.fragmentation import free_gpus
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.liquid_placer import LiquidPlacer
from shoal.placement.moving_placer import MovingPlacer
from shoal.placement.optimus_placer import OptimusPlacer
from shoal.placement.placer import Placed, PoolPlacer
from shoal.placement.registry import Setting, make_placer, placement_names
from shoal.policies.registry import make_policy
from shoal.sim.costs import Costs
from shoal.sim.engine import Simulation

from .cases import Bench, size

NODES = Cluster.of(4, 4, rack_nodes=2)
#: Each node more takes a fifth of the speed.
SPREAD = Profile.from_rows(
    "m", [("*", g, n, 1.25 ** (n - 1) / g**0.9) for g in range(1, 17) for n in range(1, min(g, 4) + 1)]
)


class Checked:
    """A placer that checks the answers of another, and counts the jobs it moved."""

    def __init__(self, inner) -> None:
        self.inner, self.moved, self.spanned = inner, 0, set()

    def place(self, view, decision, supply, current) -> Placed:
        placed = self.inner.place(view, decision, supply, current)
        after = {j: p for j, p in (current | placed.placements).items() if p}
        assert (free_gpus(supply.gpus_of_node, after.values()) >= 0).all()
        for job_id in after:
            row = view.row(job_id)
            assert size(after[job_id]) == placed.cut.get(job_id, decision.gpus[row])
            if decision.gpus[row] == view.gpus[row] and job_id in placed.placements:
                self.moved += 1
            self.spanned.add(after[job_id])
        return placed


def run(name: str, policy: str, seed: int = 0, **more):
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0, 2000, 80))
    sizes = rng.choice([1, 2, 3, 4, 8], 80).tolist()
    jobs = [
        Job(f"j{i}", float(at[i]), GpuRange(1, n), n, model="m", iterations=float(rng.uniform(20, 800)))
        for i, n in enumerate(sizes)
    ]
    chosen, profiles = make_policy(policy), {}
    checked = Checked(make_placer(name, Setting(NODES, chosen.elastic, lambda: profiles, move_s=5.0)))
    simulation = Simulation(jobs, {"m": SPREAD}, NODES, chosen, placer=checked, **more)
    profiles = simulation.scheduler.profiles
    return simulation.run(), checked


@pytest.mark.parametrize("policy", ["fifo", "afs-p", "optimus"])
@pytest.mark.parametrize("name", [n for n in placement_names() if n != "pool"])
def test_every_placement_serves_every_job_and_overcommits_no_node(name, policy):
    record, _ = run(name, policy)
    assert np.isfinite(record.finish_s).all()


def test_moving_shortens_jobs_where_speed_depends_on_nodes_and_moves_are_cheap():
    costs = Costs("restart", restart_s=5.0)

    def jct(name, seed):
        record, checked = run(name, "fifo", seed, costs=costs)
        return float(np.mean(record.finish_s - [j.submit_s for j in record.jobs])), checked.moved

    kept = [jct("keep-and-pack", s) for s in range(3)]
    moved = [jct("moving", s) for s in range(3)]
    assert all(count == 0 for _, count in kept)
    assert all(count > 0 for _, count in moved)
    assert sum(t for t, _ in moved) < sum(t for t, _ in kept)


def test_nothing_moves_when_moves_cost_more_than_the_horizon():
    assert run("moving:move_s=500:horizon_s=400", "fifo")[1].moved == 0


def test_under_coddls_rule_no_share_takes_parts_of_two_nodes():
    _, checked = run("node-or-whole-nodes", "afs-p")
    assert all(len(p) == 1 or all(g == 4 for _, g in p) for p in checked.spanned)
    assert any(len(p) > 1 for p in checked.spanned)


def test_optimus_deals_a_job_in_equal_parts_over_the_fewest_freest_nodes():
    b = Bench(NODES, OptimusPlacer())
    for job_id in range(4):
        b.add(job_id)
    assert b.place({0: 3, 1: 6}).placements == {0: ((0, 3),), 1: ((1, 3), (2, 3))}
    # Free: 1, 1, 1, 4. Four fit on node 3 alone; then three more only one by one.
    assert b.place({2: 4}).placements == {2: ((3, 4),)}
    assert b.place({3: 3}).placements == {3: ((0, 1), (1, 1), (2, 1))}
    assert b.place({1: 4}).placements == {1: ((1, 2), (2, 2))}, "who shrinks is dealt anew"
    assert b.place({1: 2}).placements == {1: ((1, 2),)}


def test_liquid_puts_each_worker_where_the_score_of_the_job_is_least():
    b = Bench(NODES, LiquidPlacer())
    for job_id in range(3):
        b.add(job_id)
    assert b.place({0: 3}).placements == {0: ((0, 3),)}
    # The fullest node first, then close by: the second node of the rack, not the other rack.
    assert b.place({1: 3}).placements == {1: ((0, 1), (1, 2))}
    assert b.place({1: 4}).placements == {1: ((0, 1), (1, 3))}, "who grows keeps what it has"


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(("r1", "r1", "r2", "r2")))))
@pytest.mark.parametrize("name", ["keep-and-pack", "liquid", "liquid-batch"])
def test_a_job_of_two_stays_in_one_rack_in_whatever_order_the_nodes_are(name, order):
    cluster = Cluster(tuple(Node(f"n{i}", 1, "gpu", rack) for i, rack in enumerate(order)))
    b = Bench(cluster, make_placer(name, Setting(cluster)))
    for job_id in range(2):
        b.add(job_id)
    b.place({0: 1})
    (first, _), (second, _) = b.place({1: 2}).placements[1]
    assert order[first] == order[second]


def test_auto_is_a_pool_without_nodes_and_packing_with_them():
    assert isinstance(make_placer("auto", Setting(Cluster.pool(4))), PoolPlacer)
    assert type(make_placer("auto", Setting(NODES))) is KeepAndPack
    assert isinstance(make_placer("pool", Setting(NODES)), PoolPlacer)


@pytest.mark.parametrize(
    "name", ["auto", "keep-and-pack", "node-or-whole-nodes", "optimus", "liquid", "liquid-batch"]
)
def test_policies_that_do_not_resize_get_all_or_nothing(name):
    assert make_placer(name, Setting(NODES, elastic=False)).all_or_nothing
    assert not make_placer(name, Setting(NODES)).all_or_nothing


def test_a_move_costs_what_the_run_says_unless_told_otherwise():
    assert make_placer("moving", Setting(NODES, move_s=7.0)).rule.move_s == 7.0
    told = make_placer("moving:move_s=3:horizon_s=60:max_moves=2", Setting(NODES, move_s=7.0)).rule
    assert (told.move_s, told.horizon_s, told.max_moves) == (3.0, 60.0, 2)
    assert [Costs(kind).move_s for kind in ("none", "restart", "concurrent", "suspend")] == [0, 30, 0.1, 3.5]


def test_a_job_of_which_nothing_is_believed_has_no_speed():
    assert Setting(NODES).speed(3, "gpu", ((0, 4),), 0) == 0.0


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("movin", "no placement 'movin'; did you mean 'moving'?"),
        ("", "known: auto"),
        ("moving:horizon=9", "did you mean 'horizon_s'?"),
        ("moving:horizon_s", "write moving:option=value"),
        ("moving:horizon_s=soon", "must be a number"),
        ("moving:max_moves=0", "1 or more"),
        ("moving:move_s=-1", "0 or more"),
        ("liquid:lam=2", "from 0 to 1"),
        ("liquid:variant=remove-ful", "did you mean 'remove-full'?"),
        ("liquid-batch:lam=2", "from 0 to 1"),
        ("liquid-batch:seed=-1", "0 or more"),
        ("keep-and-pack:x=1", "it has none"),
    ],
)
def test_a_mistake_in_the_word_is_answered_in_one_line(word, told):
    with pytest.raises(ShoalError) as error:
        make_placer(word, Setting(NODES))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["keep-and-pack", "node-or-whole-nodes", "moving", "optimus", "liquid", "liquid-batch"]
)
def test_a_placement_on_nodes_is_refused_for_a_pool(name):
    with pytest.raises(ShoalError, match="--cluster FILE"):
        make_placer(name, Setting(Cluster.pool(8)))


@dataclass(frozen=True)
class LastOptions:
    spare: int = 0


class LastNode:
    name = "last-node"
    summary = "whatever is free, the last node first"
    Options = LastOptions

    @staticmethod
    def make(setting, options):
        return ("a placer", setting.cluster, options.spare)


@pytest.mark.parametrize(("found", "ok"), [(LastNode, True), (object, False)])
def test_an_entry_point_makes_a_placement_known_by_name(monkeypatch, found, ok):
    class Entry:
        name = "last-node"

        def load(self):
            return found

    monkeypatch.setattr(named, "entry_points", lambda group: [Entry()] * (group == "shoal.placements"))
    assert "last-node" in placement_names()
    if ok:
        assert make_placer("last-node:spare=2", Setting(NODES)) == ("a placer", NODES, 2)
    else:
        with pytest.raises(ShoalError, match="has no name"):
            make_placer("last-node", Setting(NODES))


def test_every_placement_has_a_line_for_people():
    for name in registry.BUILT_IN:
        cls = registry.placement_class(name)
        assert cls.name == name
        assert cls.summary


@pytest.mark.parametrize(
    ("apart", "moves"),
    [
        (False, True),  # pw:w, 767 s, becomes pww, 510 s
        (True, False),  # p:w:w, 810 s, would become p:ww, 1190 s
    ],
)
def test_a_parameter_server_job_moves_where_its_measured_layout_is_faster(apart, moves):
    profiles = {0: Profile.of("vgg16", {1: 1.0, 2: 0.6})}
    setting = Setting(NODES, True, lambda: profiles, move_s=5.0, servers_apart=apart)
    b = Bench(NODES, make_placer("moving", setting))
    b.add(0)
    b.view.remaining[0] = 1e9
    b.place({0: 2}, given={0: ((0, 1), (1, 1))})
    b.view.servers[0] = 1
    found = b.place({}).placements
    assert found == ({0: ((0, 2),)} if moves else {})
    speeds = [setting.speed(0, "gpu", where, 1) for where in (((0, 1), (1, 1)), ((0, 2),))]
    assert (speeds[1] > speeds[0]) is moves


def test_the_policy_of_that_name_gets_its_own_placement():
    assert isinstance(make_placer("auto", Setting(NODES, policy="optimus")), OptimusPlacer)
    assert isinstance(make_placer("auto", Setting(Cluster.pool(4), policy="optimus")), PoolPlacer)


def test_the_moving_placer_believes_what_the_scheduler_believes():
    believed = {0: Profile.from_rows("b", [("*", 4, 1, 1.0), ("*", 4, 2, 1.0), ("*", 1, 1, 1.0)])}
    truth = {0: SPREAD}
    for profiles, moves in ((believed, False), (truth, True)):
        b = Bench(NODES, make_placer("moving", Setting(NODES, True, lambda p=profiles: p, move_s=5.0)))
        assert isinstance(b.placer, MovingPlacer)
        b.add(0)
        b.view.remaining[0] = 1e9
        b.place({0: 4}, given={0: ((0, 2), (1, 2))})
        assert bool(b.place({}).placements) is moves
