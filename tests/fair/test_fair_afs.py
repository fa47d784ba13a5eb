"""fair-afs: between users as fair as gandiva-fair, within a user's part as efficient as AFS."""

import json

import numpy as np
import pytest
from drive import LINEAR, Drive

from shoal.core.cluster import Cluster, Node, User
from shoal.core.errors import ShoalError
from shoal.core.profile import Profile
from shoal.policies.afs.afs_l import afs_l_shares
from shoal.policies.gandiva_fair.fair_afs import FairAfs, FairAfsOptions
from shoal.policies.registry import make_policy

GOOD = Profile.of("good", {1: 1.0, 2: 0.52, 4: 0.27, 8: 0.14, 16: 0.08})
POOR = Profile.of("poor", {1: 1.0, 2: 0.95, 4: 0.93, 8: 0.92})


def pool(gpus, **tickets):
    return Cluster.pool(gpus, users=[User(n, t) for n, t in tickets.items()])


def drive(cluster, **options):
    return Drive(cluster, FairAfs(FairAfsOptions(**{"quantum_s": 600.0, "correct_s": 3600.0, **options})))


def gpus_of(d, user):
    return int(d.view.gpus[d.view.user == d.scheduler.cluster.user_index(user)].sum())


def test_many_jobs_do_not_buy_a_user_more_than_its_part():
    d = drive(pool(16, many=1.0, one=1.0))
    for _ in range(10):
        d.submit("many", "1..16", GOOD)
    d.submit("one", "1..16", GOOD)
    assert (gpus_of(d, "many"), gpus_of(d, "one")) == (8, 8)


def test_tickets_are_the_parts_and_fractions_go_round():
    d = drive(pool(16, a=2.0, b=1.0))
    for user in "aabb":
        d.submit(user, "1..16", GOOD)
    d.run(12 * 3600)
    had = d.ledger.account[:, 0, 1] / d.now_s
    assert had == pytest.approx([32 / 3, 16 / 3], abs=0.03)


def test_inside_a_part_gpus_go_where_they_gain_most():
    d = drive(pool(16, a=1.0, b=1.0))
    good, poor = d.submit("a", "1..16", GOOD), d.submit("a", "1..8", POOR)
    d.submit("b", "1..16", GOOD)
    assert d.view.gpus[good] == 7
    assert d.view.gpus[poor] == 1


def test_with_one_user_and_known_lengths_it_is_afs_l():
    d = drive(pool(24, a=1.0), inside="afs-l")
    rng = np.random.default_rng(2)
    for k in range(7):
        d.submit("a", "1..8", (GOOD, POOR)[k % 2], iterations=float(rng.integers(100, 9000)))
        view = d.view
        view.remaining[:] = view.total  # the driver tells of no progress
        d.step()
        shares = afs_l_shares(
            view.total.copy(), view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, 24
        )
        assert view.gpus.tolist() == shares.tolist()
        view.remaining[:] = view.total


def test_slack_goes_to_whoever_gains_most_and_parts_hold_for_the_rest():
    d = drive(pool(16, good=1.0, poor=1.0), slack=0.5)
    for user, profile in (("good", GOOD), ("good", GOOD), ("poor", POOR), ("poor", POOR)):
        d.submit(user, "1..8", profile)
    assert (gpus_of(d, "good"), gpus_of(d, "poor")) == (12, 4)


def test_what_a_user_cannot_use_is_lent_by_gain_and_given_back():
    d = drive(pool(16, small=1.0, big=1.0))
    d.submit("small", 2)
    d.submit("big", "1..16", GOOD)
    assert (gpus_of(d, "small"), gpus_of(d, "big")) == (2, 14)
    for _ in range(2):
        d.submit("small", "1..8", GOOD)
    assert gpus_of(d, "small") == 8


def test_rigid_gangs_and_pools_share_by_pass_and_no_gang_starves():
    d = drive(pool(8, a=1.0, b=1.0))
    gangs = [d.submit("a", 8), d.submit("a", 4)]
    for _ in range(3):
        d.submit("b", "1..8", GOOD)
    d.run(24 * 3600)
    assert np.abs(d.off_by()).max() <= 8 * 600
    assert all(d.had[g] / d.now_s == pytest.approx(2.0, abs=0.25) for g in gangs)


@pytest.mark.parametrize("seed", range(5))
def test_users_are_within_a_quantums_work_of_their_parts(seed):
    rng = np.random.default_rng(seed)
    users = {f"u{k}": float(rng.integers(1, 5)) for k in range(int(rng.integers(2, 5)))}
    cluster = Cluster.of(4, 4).with_users([User(n, t) for n, t in users.items()])
    d = drive(cluster)
    for _ in range(int(rng.integers(10, 30))):
        user = f"u{rng.integers(len(users))}"
        if rng.random() < 0.7:
            d.submit(user, "1..8", (GOOD, POOR)[int(rng.integers(2))])
        else:
            d.submit(user, int(rng.choice([1, 2, 4])))
    for _ in range(3):
        d.run(4 * 3600)
        assert np.abs(d.off_by()).max() <= 16 * 600
        assert d.view.gpus.sum() == 16
    assert all(d.had[j] > 0 for j in d.view.job_ids.tolist())


def test_users_trade_types_and_elastic_jobs_follow():
    up = {
        f: Profile.from_rows(
            f"x{f}", [(t, g, 0, g**-0.95 / s) for t, s in (("k80", 1), ("v100", f)) for g in (1, 2, 4, 8)]
        )
        for f in (1.2, 6.0, 2.0)
    }
    nodes = [Node(f"k{i}", 4, "k80") for i in range(6)] + [Node("v0", 4, "v100")]
    d = drive(Cluster(tuple(nodes), tuple(User(n) for n in "abc")))
    for user, factor in zip("abc", up):
        for _ in range(8):
            d.submit(user, "1..4", up[factor])
    d.run(8 * 3600)
    assert {t.buyer for t in d.policy.market.trades} == {1}
    had = d.ledger.account[:, :, 1] / d.now_s
    assert had[1, 1] == pytest.approx(4.0, abs=0.4)
    np.testing.assert_allclose(had.sum(axis=0), [24, 4], atol=0.2)


def test_a_job_moves_to_a_faster_type_that_is_free_though_nothing_else_happens():
    """When the GPUs become free, the last move was a moment ago, so this one has to wait."""
    speed = Profile.from_rows(
        "x", [(t, g, 0, 1 / g / s) for t, s in (("slow", 1), ("fast", 4)) for g in (1, 2)]
    )
    d = drive(Cluster((Node("s", 4, "slow"), Node("f", 2, "fast")), (User("a"), User("b"))), balance_s=600.0)
    other = d.submit("b", 1, speed)
    for _ in range(2):
        d.submit("a", "1..2", speed)
    d.run(700.0)
    d.finish(other)
    assert d.policy.moved_s, "there was a move"
    fast = d.view.gpu_types.index("fast")
    assert fast not in d.view.gpu_type
    d.run(1200.0)
    assert d.view.gpu_type.tolist().count(fast) == 1
    assert d.view.gpus.tolist() == [2, 2]
    assert d.wake_s == np.inf, "and then there is nothing more to do"


def test_it_goes_on_from_a_saved_state_exactly_as_before():
    def scene(restart):
        d = drive(pool(12, a=1.0, b=2.0))
        for k in range(14):
            d.submit("ab"[k % 2], ("1..8", 2, "2..4", 4)[k % 4], (GOOD, LINEAR)[k % 2])
        d.run(5000)
        if restart:
            saved = json.loads(json.dumps(d.policy.state()))
            d.policy = d.scheduler.policy = FairAfs(d.policy.options)
            d.policy.restore(saved)
        d.run(20000)
        return d.had

    assert scene(False) == scene(True)


def test_lengths_that_are_not_known_are_asked_for_by_name():
    d = drive(pool(8, a=1.0), inside="afs-l")
    with pytest.raises(ShoalError, match="iterations"):
        d.submit("a", "1..8", GOOD)


@pytest.mark.parametrize("options", [{"inside": "fifo"}, {"quantum_s": "-1"}, {"slack": "2"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ShoalError, match="fair-afs"):
        make_policy("fair-afs", options)
