"""Sets of gangs, on all nodes at once, that take nobody too far off its part."""

import numpy as np
import pytest
from drive import Drive

from shoal.core.cluster import Cluster, Node, User
from shoal.core.profile import Profile
from shoal.policies.gandiva_fair import binding, scenes
from shoal.policies.gandiva_fair.guard import LIMIT, LOST, Choice, Scene, in_question, steer
from shoal.policies.gandiva_fair.kernels import SPANS
from shoal.policies.registry import make_policy

QUANTUM_S = 60.0


def scene(jobs, part, gpus, spans=(), owed=None):
    """`jobs` are (user, size) and `spans` the (node, GPUs) of the last of them, which span nodes."""
    part = np.array(part, float)
    return Scene(
        user=np.array([u for u, _ in jobs], np.int32),
        size=np.array([s for _, s in jobs], np.int32),
        small=len(jobs) - len(spans),
        gpus=sum(gpus),
        widest=max(gpus),
        owed=np.zeros(len(part)) if owed is None else np.array(owed, float),
        part=part / part.sum(),
        urgency=np.ones(len(part)),
    )


def steered(it, gpus, where, spans, runs, **more):
    """(who runs, GPUs left on each node, places of spans) where `runs` would have run."""
    out = choice_of(it, gpus, where, spans, runs, **more)
    return np.flatnonzero(out.runs).tolist(), out.free.tolist(), out.place[it.small :].tolist()


def choice_of(it, gpus, where, spans, runs, must=(), pressed=(), most_moves=0):
    n = len(it.user)
    place = np.zeros((n, len(gpus)), np.int64)
    place[np.arange(it.small), where] = it.size[: it.small]
    for i, span in enumerate(spans, it.small):
        for s, taken in span:
            place[i, s] = taken
    chosen, has_to = np.zeros(n, bool), np.zeros(n, bool)
    chosen[list(runs)] = True
    has_to[list(must)] = True
    before = Choice(chosen, np.array(gpus) - place[chosen].sum(axis=0), place.copy())
    pressed = np.array(pressed, np.int64)
    out = steer(it, before, has_to, np.ones(n, bool), most_moves, np.arange(n), pressed)
    if not in_question(it, before, pressed):
        lost = np.abs(it.owed).max() > LOST * it.gpus  # then nothing is steered, whatever that would change
        assert lost or (out.runs == chosen).all()
        assert lost or (out.place == place).all()
        out = before
    assert (out.place != place).any(axis=1).sum() <= most_moves
    assert (out.place.sum(axis=1) == it.size).all()
    assert (out.place[: it.small].max(axis=1) == it.size[: it.small]).all(), "on one node"
    return out


#: User 0 has four jobs of 2 on two nodes of 4, user 1 a gang of both nodes.
TWO = [(0, 2)] * 4 + [(1, 8)]
NODES = [4, 4]
SPAN = [((0, 4), (1, 4))]
AT = (NODES, [0, 0, 1, 1], SPAN)


def test_a_gang_does_not_run_that_would_take_its_user_too_far_ahead():
    ahead = scene(TWO, [4.0, 4.0], NODES, SPAN, owed=[3.0, -3.0])
    assert steered(ahead, *AT, [4]) == ([0, 1, 2, 3], [0, 0], [[4, 4]])


def test_what_takes_nobody_too_far_is_left_as_it_is():
    even = scene(TWO, [4.0, 4.0], NODES, SPAN)
    assert steered(even, *AT, [4])[0] == [4]
    assert steered(even, *AT, [0, 1, 2, 3])[0] == [0, 1, 2, 3]


def test_who_must_run_does_so_however_far_ahead_it_is():
    ahead = scene(TWO, [4.0, 4.0], NODES, SPAN, owed=[5.0, -5.0])
    assert steered(ahead, *AT, [4], must=[4])[0] == [4]


def test_where_users_cannot_have_their_parts_sets_go_by_weight_alone():
    lost = scene(TWO, [4.0, 4.0], NODES, SPAN, owed=[17.0, -17.0])
    assert steered(lost, *AT, [4])[0] == [4]


def test_a_gang_that_has_waited_long_runs_as_soon_as_that_takes_nobody_too_far():
    it = scene(TWO, [6.0, 2.0], NODES, SPAN)
    step = 6 / 8  # of a quantum's work, that user 1 is further ahead after it
    for behind, runs in ((step - LIMIT - 0.01, [0, 1, 2, 3]), (step - LIMIT + 0.01, [4])):
        it.owed[:] = -8 * behind, 8 * behind
        assert steered(it, *AT, [0, 1, 2, 3], pressed=[4])[0] == runs


def test_a_user_saves_up_for_a_gang_that_has_waited_long():
    # Both sets fill the nodes. User 1 is slightly behind; but for its gang of 8, which has waited long, it needs more.
    jobs = [(0, 4), (0, 4), (1, 4), (1, 8)]
    it = scene(jobs, [6.0, 2.0], NODES, SPAN, owed=[-3.0, 3.0])
    assert steered(it, NODES, [0, 1, 1], SPAN, [0, 2])[0] == [0, 2]
    it.owed[:] = [3.5, -3.5]
    assert steered(it, NODES, [0, 1, 1], SPAN, [0, 2], pressed=[3])[0] == [0, 1]


def test_a_job_changes_its_node_where_its_user_is_too_far_behind_but_only_if_it_may():
    # Jobs of users 0 and 1, both behind, share node 0; node 1 is user 2's, who is far ahead.
    it = scene([(0, 2), (1, 2), (2, 2)], [1.0, 1.0, 1.0], [2, 2], owed=[2.4, 2.4, -4.8])
    assert steered(it, [2, 2], [0, 0, 1], [], [0, 2], most_moves=1)[0] == [0, 1]
    runs = steered(it, [2, 2], [0, 0, 1], [], [0, 2])[0]
    assert runs in ([0, 2], [1, 2])


def test_a_gang_changes_nodes_to_run_beside_another_but_only_if_it_may():
    # Gangs of 4 on three nodes of 2 meet on node 1; user 0's job of 2 is on node 2, and it is far ahead.
    jobs = [(0, 2), (0, 2), (1, 4), (2, 4)]
    spans = [((0, 2), (1, 2)), ((1, 2), (2, 2))]
    gpus = [2, 2, 2, 2]
    it = scene(jobs, [2.0, 3.0, 3.0], gpus, spans, owed=[-6.0, 3.0, 3.0])
    runs, free, place = steered(it, gpus, [2, 3], spans, [0, 1, 2], most_moves=8)
    assert runs == [2, 3]
    assert free == [0] * 4
    assert np.sum(place, axis=0).tolist() == [2] * 4
    runs, _, place = steered(it, gpus, [2, 3], spans, [0, 1, 2])
    assert runs != [2, 3]
    assert place == [[2, 2, 0, 0], [0, 2, 2, 0]]


@pytest.mark.parametrize("seed", range(60))
def test_a_steered_choice_is_possible_full_and_no_worse(seed):
    rng = np.random.default_rng(seed)
    users, gpus = 3, [4, 4, 4]
    small = [(int(rng.integers(users)), int(rng.choice([1, 2, 3, 4]))) for _ in range(8)]
    large = [(int(rng.integers(users)), int(rng.choice([8, 12]))) for _ in range(2)]
    nodes = [sorted(rng.choice(3, size // 4, replace=False).tolist()) for _, size in large]
    owed = rng.normal(scale=6.0, size=users)
    spans = [[(s, 4) for s in on] for on in nodes]
    it = scene(small + large, 1 + rng.random(users), gpus, spans, owed=owed - owed.mean())
    where, free, runs = rng.integers(3, size=8), np.array(gpus), []
    for i in range(8):  # one by one, as stride does
        if free[where[i]] >= it.size[i]:
            free[where[i]] -= it.size[i]
            runs.append(i)
    out = choice_of(it, gpus, where, spans, runs, must=runs[:1], most_moves=2)
    after, left = np.flatnonzero(out.runs).tolist(), out.free
    assert runs[0] in after
    assert (out.place[after].sum(axis=0) + left).tolist() == gpus
    assert min(left) >= 0
    waiting = [i for i in range(8) if i not in after]
    assert not any(it.size[i] <= left[out.place[i].argmax()] for i in waiting)  # no GPU idles in vain

    def off(rows):
        had = np.bincount(it.user[rows], weights=it.size[rows], minlength=users)
        return np.sum((np.abs(it.owed + it.part * had.sum() - had) / 12) ** 6)

    if sum(left) == free.sum() == 0:  # else idle GPUs will take in others yet
        assert after == runs or off(after) < off(runs)


#: Claims that stride and relief alone leave more than a quantum's work off: gangs that can only run beside each
#: other if one changes its nodes; a gang of all nodes whose user has small jobs too.
HARD = {
    "two gangs that meet on a node": (4, 4, {"u0": (1, (2, 8, 16)), "u1": (3, (4, 8)), "u2": (3, (1, 8))}),
    "gangs of all nodes": (
        2,
        4,
        {"u0": (3, (1, 1, 2, 2, 2, 2, 8)), "u1": (1, (1, 1, 1, 2, 2, 2, 4, 4, 8, 8))},
    ),
    "a user of one gang of all nodes": (
        3,
        4,
        {
            "u0": (3, (1, 1, 2, 4, 4, 8, 8)),
            "u1": (2, (1, 4, 4, 8, 8)),
            "u2": (1, (1, 1, 2, 8, 8, 12)),
            "u3": (3, (12,)),
        },
    ),
}


def waiting_that_fit(d):
    """Sizes of waiting gangs that would fit on GPUs that idle."""
    free = d.scheduler.supply.gpus_of_node.copy()
    for where in d.scheduler.placements.values():
        for node, gpus in where:
            free[node] -= gpus
    widest = d.scheduler.supply.gpus_of_node.max()
    sizes = d.view.requested_gpus[d.view.gpus == 0].tolist()
    return [s for s in sizes if s <= (free.max() if s <= widest else free.sum())]


@pytest.mark.parametrize("name", HARD)
def test_users_with_gangs_that_span_nodes_are_always_within_a_quantums_work_of_their_parts(name):
    nodes, gpus, claims = HARD[name]
    users = [User(user, float(tickets)) for user, (tickets, _) in claims.items()]
    d = Drive(Cluster.of(nodes, gpus).with_users(users), make_policy("gandiva-fair"))
    for user, (_, sizes) in claims.items():
        for size in sizes:
            d.submit(user, size)
    for _ in range(6 * 60):
        d.run(QUANTUM_S)
        assert np.abs(d.off_by_of_what_was_given()).max() <= nodes * gpus * QUANTUM_S
        turn_s = QUANTUM_S * d.view.requested_gpus / d.view.column("due_gpus")
        assert ((d.now_s - d.view.changed_s) / turn_s)[d.view.gpus == 0].max(initial=0.0) <= 10.0
        assert waiting_that_fit(d) == []


def test_a_gang_that_spans_nodes_of_one_type_is_no_such_gang_where_it_fits_a_node(monkeypatch):
    machines = [Node(f"p{i}", 8, "p100") for i in range(3)] + [Node(f"k{i}", 4, "k80") for i in range(6)]
    users = [User("a"), User("b", 2.0), User("c")]
    d = Drive(Cluster(tuple(machines), tuple(users)), make_policy("gandiva-fair", {"rest_s": "0"}))
    seen = []

    def look(r):
        for outset in scenes.outsets(r):
            n = len(outset.rows) - outset.scene.small
            assert outset.place.sum(axis=1).tolist() == outset.scene.size.tolist()
            assert (r.home[outset.rows[outset.scene.small :]] <= SPANS).all()
            seen.append((set(r.types[outset.rows].tolist()), n))
            yield outset

    monkeypatch.setattr(binding, "outsets", look)
    rng = np.random.default_rng(3)
    ups = {"a": 5.0, "b": 1.2, "c": 3.0}
    running = []
    for _ in range(120):
        user, size = str(rng.choice(["a", "b", "c"])), int(rng.choice([1, 2, 4, 8, 8, 16]))
        rows = [
            (t, g, 0, 1 / g / v) for t, v in (("k80", 1.0), ("p100", ups[user])) for g in (1, 2, 4, 8, 16)
        ]
        running.append(d.submit(user, size, Profile.from_rows(user, rows)))
        d.run(240.0)
        if len(running) > 12:
            d.finish(running.pop(int(rng.integers(12))))
    assert {len(types) for types, _ in seen} == {1}
    assert max(n for _, n in seen) >= 2
