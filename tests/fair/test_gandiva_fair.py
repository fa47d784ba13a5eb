"""gandiva-fair as a whole: users get their parts, whoever comes, goes, or has more tickets from now on."""

import json

import numpy as np
import pytest
from drive import LINEAR, Drive

from shoal.core.cluster import Cluster, Node, User
from shoal.core.errors import ShoalError
from shoal.core.events import NodeBack, NodeLost, Timer
from shoal.core.profile import Profile
from shoal.core.reason import Code
from shoal.policies.gandiva_fair.binding import Binding
from shoal.policies.gandiva_fair.gandiva_fair import GandivaFair, GandivaFairOptions
from shoal.policies.registry import make_policy

QUANTUM_S = 60.0


def pool(gpus, **tickets):
    return Cluster.pool(gpus, users=[User(n, t) for n, t in tickets.items()])


def nodes(count, gpus=4, **tickets):
    return Cluster.of(count, gpus).with_users([User(n, t) for n, t in tickets.items()])


def drive(cluster, **options):
    return Drive(cluster, GandivaFair(GandivaFairOptions(**options)))


def mean_gpus(d, seconds, jobs_of):
    before = dict(d.had)
    d.run(seconds)
    return {u: sum(d.had[j] - before.get(j, 0) for j in jobs) / seconds for u, jobs in jobs_of.items()}


def test_the_worked_example_gives_three_three_and_two():
    d = drive(pool(8, a=1.0, b=1.0, c=1.0))
    jobs = {"a": [d.submit("a", 2) for _ in range(2)], "b": [d.submit("b", 2) for _ in range(2)]}
    jobs["c"] = [d.submit("c", 2)]
    assert mean_gpus(d, 7200, jobs) == pytest.approx({"a": 3, "b": 3, "c": 2}, abs=0.05)


@pytest.mark.parametrize(
    ("gpus", "jobs", "printed"),
    [
        (1, {"B": (1, 1), "A": (1, 4)}, "B A A A A B A A A"),
        (
            4,
            {"E": (4, 1), "A": (1, 1), "B": (1, 1), "C": (2, 1), "D": (2, 1)},
            "E ABC ABD ABC ABD E ABC ABD ABC ABD",
        ),
    ],
    ids=["plain stride", "gangs"],
)
def test_the_whole_policy_runs_the_tables_of_the_slides_tick_by_tick(gpus, jobs, printed):
    d = drive(pool(gpus, **{name: float(tickets) for name, (_, tickets) in jobs.items()}))
    ids = {d.submit(name, size): name for name, (size, _) in jobs.items()}  # in tie order
    ran = []
    for _ in printed.split():
        ran.append("".join(sorted(ids[j] for j in d.view.job_ids[d.view.gpus > 0].tolist())))
        d.run(QUANTUM_S)
        d.step(Timer())
    assert ran == printed.split()


@pytest.mark.parametrize(
    ("a", "expected"), [(1.0, {"a": 4.0, "b": 4.0}), (3.0, {"a": 6.0, "b": 2.0})], ids=["equal", "3 to 1"]
)
def test_a_gang_across_nodes_shares_with_small_jobs_by_tickets(a, expected):
    d = drive(nodes(2, a=a, b=1.0))
    jobs = {"a": [d.submit("a", 8)], "b": [d.submit("b", 2) for _ in range(4)]}
    assert mean_gpus(d, 4 * 3600, jobs) == pytest.approx(expected, abs=0.1)


def test_time_slicing_is_asked_for_only_when_somebody_waits():
    d = drive(pool(8, a=1.0))
    d.submit("a", 4)
    assert d.wake_s == np.inf
    d.submit("a", 4)
    assert d.wake_s == np.inf
    last = d.submit("a", 1)
    assert d.wake_s == QUANTUM_S
    d.finish(last)
    assert d.wake_s == np.inf


def random_claims(rng, users, largest):
    """Users with jobs of 1, 2, 4, ... GPUs that are more than fit."""
    sizes = [s for s in (1, 2, 4, 8) if s <= largest]
    return [(f"u{rng.integers(users)}", int(rng.choice(sizes))) for _ in range(int(rng.integers(18, 40)))]


@pytest.mark.parametrize("seed", range(4))
def test_on_one_node_users_are_within_a_quantums_work_of_their_parts(seed):
    rng = np.random.default_rng(seed)
    users = int(rng.integers(2, 6))
    d = drive(pool(8, **{f"u{k}": float(rng.integers(1, 5)) for k in range(users)}))
    for user, gpus in random_claims(rng, users, 4):
        d.submit(user, gpus)
    for _ in range(2):
        d.run(2 * 3600)
        assert np.abs(d.off_by()).max() <= 8 * QUANTUM_S
    assert all(d.had[j] > 0 for j in d.view.job_ids.tolist())


def test_a_user_whose_jobs_are_due_all_of_the_time_is_not_kept_waiting_for_gangs():
    """It can never have more than its jobs can use, so what it misses could never be made up for."""
    d = drive(nodes(4, few=1.0, many=1.0))
    few = [d.submit("few", 1) for _ in range(4)]
    for gpus in (4, 4, 4, 4, 4, 4, 2, 2):
        d.submit("many", gpus)
    d.run(12 * 3600)
    assert sum(d.had[j] for j in few) >= 4 * d.now_s - 16 * QUANTUM_S
    assert sum(d.had.values()) >= 0.98 * 16 * d.now_s


def test_a_stream_of_short_jobs_gains_nothing():
    """Each new job is owed its turn at once, but what the one before it had too much is handed on to it."""
    d = drive(pool(4, quick=1.0, slow=1.0))
    slow = [d.submit("slow", 1) for _ in range(8)]
    quick = d.submit("quick", 4)
    for _ in range(240):
        d.run(QUANTUM_S / 2)
        if d.had[quick] >= 4 * QUANTUM_S:
            d.finish(quick)
            quick = d.submit("quick", 4)
    assert d.made > 60
    assert sum(d.had[j] for j in slow) == pytest.approx(2 * d.now_s, rel=0.05)


def test_a_user_who_comes_back_finds_what_it_owed_and_no_more():
    d = drive(pool(4, a=1.0, b=1.0))
    for _ in range(4):
        d.submit("b", 1)
    first = d.submit("a", 4)
    d.run(QUANTUM_S / 2)
    d.finish(first)
    d.run(3600)
    again = d.submit("a", 4)
    assert mean_gpus(d, 2 * 3600, {"a": [again]})["a"] == pytest.approx(2.0, abs=0.1)


def test_new_tickets_count_from_now_on():
    d = drive(pool(8, a=1.0, b=1.0))
    jobs = {"a": [d.submit("a", 2) for _ in range(4)], "b": [d.submit("b", 2) for _ in range(4)]}
    assert mean_gpus(d, 3600, jobs) == pytest.approx({"a": 4, "b": 4}, abs=0.2)
    d.tickets("a", 3.0)
    assert mean_gpus(d, 3600, jobs) == pytest.approx({"a": 6, "b": 2}, abs=0.2)
    d.tickets("c", 4.0)  # a user nobody knew
    jobs["c"] = [d.submit("c", 4) for _ in range(2)]
    assert mean_gpus(d, 7200, jobs) == pytest.approx({"a": 3, "b": 1, "c": 4}, abs=0.2)


def test_no_gpu_idles_while_a_waiting_gang_fits_and_moves_stay_few():
    rng = np.random.default_rng(5)
    d = drive(nodes(4, a=1.0, b=2.0))
    jobs = [d.submit("ab"[int(rng.integers(2))], int(rng.choice([1, 2, 4]))) for _ in range(20)]
    for _ in range(60):
        d.run(QUANTUM_S)
        if rng.random() < 0.2 and jobs:
            d.finish(jobs.pop(int(rng.integers(len(jobs)))))
        waiting = d.view.requested_gpus[d.view.gpus == 0]
        used = np.zeros(4, int)
        for where in d.scheduler.placements.values():
            for node, gpus in where:
                used[node] += gpus
        assert not len(waiting) or waiting.min() > (4 - used).max()
    assert d.policy.binding.migrations <= 60


def test_jobs_of_a_lost_node_go_elsewhere_and_may_come_back():
    d = drive(nodes(2, a=1.0))
    jobs = [d.submit("a", 4), d.submit("a", 4)]
    assert (d.view.gpus == 4).all()
    d.step(NodeLost(0))
    assert d.view.gpus.sum() == 4
    before = dict(d.had)
    d.run(1200)
    assert all(d.had[j] - before.get(j, 0) == pytest.approx(2400, abs=240) for j in jobs)
    d.step(NodeBack(0))
    d.run(600)
    assert d.view.gpus.sum() == 8


def mixed(**tickets):
    machines = [Node(f"k{i}", 4, "k80") for i in range(6)] + [Node("v0", 4, "v100")]
    return Cluster(tuple(machines), tuple(User(n, t) for n, t in tickets.items()))


def speed_up(factor):
    return Profile.from_rows(
        f"x{factor}", [(t, g, 0, 1 / g / up) for t, up in (("k80", 1), ("v100", factor)) for g in (1, 2, 4)]
    )


def test_users_trade_and_get_what_they_traded_for():
    d = drive(mixed(slow=1.0, fast=1.0, third=1.0))
    for user, factor in (("slow", 1.2), ("fast", 6.0), ("third", 2.0)):
        for gpus in (1, 1, 1, 1, 1, 1, 2, 2, 2, 4):
            d.submit(user, gpus, speed_up(factor))
    d.run(12 * 3600)
    trades = d.policy.market.trades
    assert [(t.seller, t.buyer, round(t.price, 6)) for t in trades] == [(0, 1, 2.0), (2, 1, 2.0)]
    had = d.ledger.account[:, :, 1] / d.now_s
    np.testing.assert_allclose(had, d.policy.market.weights, atol=0.35)
    assert had[1, 1] == pytest.approx(4.0, abs=0.3)
    named = d.policy.report()["trades"][-1]["trades"]
    assert {(t["buyer"], t["fast"], t["slow"]) for t in named} == {("fast", "v100", "k80")}


def test_measured_profiles_lead_to_the_same_trades_as_given_ones():
    d = drive(mixed(slow=1.0, fast=1.0, third=1.0), profiling="user")
    for user, factor in (("slow", 1.2), ("fast", 6.0), ("third", 2.0)):
        for gpus in (1, 1, 1, 1, 1, 1, 2, 2, 2, 4):
            d.submit(user, gpus, speed_up(factor))
    assert not d.policy.market.trades
    d.run(3600)
    assert [(t.seller, t.buyer, round(t.price, 6)) for t in d.policy.market.trades] == [
        (0, 1, 2.0),
        (2, 1, 2.0),
    ]
    measured = d.policy.report()["profiles"]["fast"]
    assert measured["v100"]["speed"] / measured["k80"]["speed"] == pytest.approx(6.0)
    assert measured["v100"]["samples"] >= 2


def three_users(**options):
    d = drive(mixed(slow=1.0, fast=1.0, third=1.0), profiling="user", **options)
    owner = {}
    for user, factor in (("slow", 1.2), ("fast", 6.0), ("third", 2.0)):
        for gpus in (1, 1, 1, 1, 1, 1, 2, 2, 2, 4):
            owner[d.submit(user, gpus, speed_up(factor))] = user
    return d, owner


def measured_speed_up(d, user):
    profile = d.policy.report()["profiles"][user]
    return profile["v100"]["speed"] / profile["k80"]["speed"]


def test_stale_profiles_are_measured_again_by_new_visits():
    d, _ = three_users(stale_s=1800.0)
    d.run(2 * 3600)
    for profile in d.policy.report()["profiles"].values():
        assert set(profile) == {"k80", "v100"}
        assert all(m["last_s"] >= d.now_s - 1800 - 2 * 600 for m in profile.values())


def test_noisy_measurements_are_repeated_until_the_speed_ups_and_the_trades_are_right():
    repeated = 0
    for seed in range(11, 17):
        rng = np.random.default_rng(seed)
        d, owner = three_users()
        d.measured = lambda job, rate: rate * (rng.lognormal(0, 0.5) if owner.get(job) == "fast" else 1.0)  # noqa: B023
        d.run(4 * 3600)
        profiles = d.policy.report()["profiles"]
        assert all(m["samples"] == 2 for m in profiles["third"].values()), f"seed {seed}"
        repeated += all(m["samples"] >= 6 and m["spread"] > 0.2 for m in profiles["fast"].values())
        error = (
            0.5 * sum(1 / m["samples"] for m in profiles["fast"].values()) ** 0.5
        )  # of the log, by the noise above
        assert abs(np.log(measured_speed_up(d, "fast") / 6.0)) <= 3 * error, f"seed {seed}"
        assert {t.buyer for t in d.policy.market.trades} == {1}, f"seed {seed}"
    # Two noisy samples may agree by chance; a measurement stops there.
    assert repeated >= 4


def test_a_user_whose_jobs_change_is_measured_anew_and_trades_by_what_they_are_now():
    d, owner = three_users()
    d.run(2 * 3600)
    assert {t.buyer for t in d.policy.market.trades} == {1}
    v100 = d.view.gpu_types.index("v100")

    def changed(job, rate):  # the user's new model gains nothing from a V100
        there = job in d.view and d.view.gpu_type[d.view.row(job)] == v100
        return rate / 6.0 if owner.get(job) == "fast" and there else rate

    d.measured = changed
    d.run(2 * 3600)
    assert measured_speed_up(d, "fast") == pytest.approx(1.0)
    assert {t.buyer for t in d.policy.market.trades} == {2}


def test_jobs_are_moved_a_few_at_a_time_and_rest_when_moved(monkeypatch):
    made, note = [], Binding._record

    def spy(self, r, row, *, rest=True):
        note(self, r, row, rest=rest)
        if rest:  # not those that moved to idle GPUs
            made.append((r.now_s, int(r.view.job_ids[row])))

    monkeypatch.setattr(Binding, "_record", spy)
    d = drive(nodes(6, a=1.0, b=3.0), migrations=2, rest_s=3600.0)
    rng = np.random.default_rng(3)
    jobs = [d.submit("ab"[k % 2], int(rng.choice([1, 2, 4]))) for k in range(40)]
    for _ in range(24):
        d.run(600)
        d.finish(jobs.pop(int(rng.integers(len(jobs)))))
        jobs.append(d.submit("ab"[int(rng.integers(2))], int(rng.choice([1, 2, 4]))))
    assert made
    last: dict[int, float] = {}
    for at_s, job in made:
        assert at_s - last.get(job, -np.inf) >= 3600
        last[job] = at_s
        # Two by the balancer, every 600 s, and two in any 600 s for users that are behind.
        assert sum(at_s - 600 < other_s <= at_s for other_s, _ in made) <= 4


def test_a_job_goes_to_the_type_that_is_fastest_for_it_while_that_is_free():
    old_is_faster = Profile.from_rows("gru", [("k80", 1, 0, 1.0), ("v100", 1, 0, 2.0)])
    d = drive(mixed(a=1.0))
    d.submit("a", 1, old_is_faster)
    d.submit("a", 1, speed_up(3.0))
    assert [d.view.gpu_types[t] for t in d.view.gpu_type] == ["k80", "v100"]


def test_a_gang_that_fits_no_group_of_nodes_waits_and_is_told_why():
    d = drive(mixed(a=1.0))
    job = d.submit("a", 8, LINEAR, gpu_types=("v100",))
    outcome = d.scheduler.outcome(job, 0.0)
    assert outcome.share.gpus == 0
    assert outcome.reason.code is Code.INFEASIBLE
    assert "8" in outcome.reason.sentence
    other = d.submit("a", 4)
    assert d.view.gpus[d.view.row(other)] == 4


def test_it_goes_on_from_a_saved_state_exactly_as_before():
    def scene(restart):
        d = drive(mixed(a=1.0, b=2.0))
        for k in range(14):
            d.submit("ab"[k % 2], (1, 2, 4, 8)[k % 4], speed_up(2.0 + k % 2) if k % 4 < 3 else LINEAR)
        d.run(1830)
        if restart:
            saved = json.loads(json.dumps(d.policy.state()))
            d.policy = d.scheduler.policy = GandivaFair()
            d.policy.restore(saved)
        d.run(1830)
        return d.had, d.scheduler.placements

    assert scene(False) == scene(True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantum_s": "0"}, "quantum_s"),
        ({"profiling": "maybe"}, "given, user, job"),
        ({"tie_order": "x"}, "oldest"),
        ({"quantum": "60"}, "did you mean 'quantum_s'"),
        ({"min_gain": "-1"}, "min_gain"),
    ],
)
def test_bad_options_are_refused_with_what_to_change(options, message):
    with pytest.raises(ShoalError, match=message):
        make_policy("gandiva-fair", options)


@pytest.mark.parametrize("tickets", [0.0, -1.0, float("inf")])
def test_bad_tickets_are_refused(tickets):
    d = drive(pool(8, a=1.0))
    with pytest.raises(ShoalError, match="give a positive number"):
        d.tickets("a", tickets)


def test_a_gpu_type_no_node_has_is_refused():
    with pytest.raises(ShoalError, match="no node has GPUs of type 'a100'"):
        mixed(a=1.0).type_index("a100")


@pytest.mark.parametrize("name", ["gandiva-fair", "fair-afs"])
def test_when_the_last_job_is_gone_nobody_is_entitled_to_anything(name):
    d = Drive(pool(8, a=1.0, b=1.0), make_policy(name))
    job = d.submit("a", 4)
    assert d.policy.entitled().tolist() == [[4.0], [0.0]]
    d.run(100)
    d.finish(job)
    assert d.policy.entitled().tolist() == [[0.0], [0.0]]
    d.run(100)
    d.submit("b", 8)
    assert d.policy.entitled().tolist() == [[0.0], [8.0]]


def test_equal_seeds_give_equal_runs():
    def run():
        d = drive(nodes(3, a=1.0, b=1.0))
        for k in range(12):
            d.submit("ab"[k % 2], (1, 2, 4)[k % 3])
        d.run(3600)
        return d.had

    assert run() == run()


def test_options_of_the_previous_version_that_are_gone_are_accepted_in_saved_settings():
    given = {"quantum_s": "30", "pull": "20", "relief_quanta": "0.2"}
    assert make_policy("gandiva-fair", given).options.quantum_s == 30.0
    with pytest.raises(ShoalError, match="has no option 'pulls'"):
        make_policy("gandiva-fair", {"pulls": "20"})
