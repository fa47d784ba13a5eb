"""Stride: the two printed tables tick by tick, exact bookkeeping of those who come, go and change tickets."""

from fractions import Fraction as F
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.policies.gandiva_fair.stride import GangStride, Strider, pick_plain


def plain_table(tie_order, quanta):
    jobs = [Strider(name, {"A": F(4), "B": F(1)}[name]) for name in tie_order]
    ran, passes = "", []
    for _ in range(quanta):
        passes.append({j.name: j.passed for j in jobs})
        i = pick_plain(jobs)
        ran += jobs[i].name
        jobs[i] = jobs[i].ran()
    return ran, [(p["A"], p["B"]) for p in passes]


def test_plain_stride_runs_the_printed_table_when_ties_go_to_b():
    ran, passes = plain_table("BA", 9)
    assert ran == "BAAAABAAA"
    quarter = F(1, 4)
    assert passes == [
        (0, 0), (0, 1), (quarter, 1), (2 * quarter, 1), (3 * quarter, 1), (1, 1), (1, 2),
        (5 * quarter, 2), (6 * quarter, 2),
    ]  # fmt: skip


def test_plain_stride_with_ties_to_a_starts_otherwise_but_shares_alike():
    ran, _ = plain_table("AB", 1000)
    assert ran[0] == "A"
    assert ran.count("A") == 800


SIZES = {"A": 1, "B": 1, "C": 2, "D": 2, "E": 4}
PRINTED = ["E", "ABC", "ABD", "ABC", "ABD", "E", "ABC", "ABD", "ABC"]
PASSES = [
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 4), (1, 1, 2, 0, 4), (2, 2, 2, 2, 4), (3, 3, 4, 2, 4),
    (4, 4, 4, 4, 4), (4, 4, 4, 4, 8), (5, 5, 6, 4, 8), (6, 6, 6, 6, 8),
]  # fmt: skip


def gangs(tie_order):
    return GangStride(4, [Strider(name, F(1), SIZES[name]) for name in tie_order])


def test_gang_aware_stride_runs_the_printed_table():
    node = gangs("EABCD")
    for t, ran in enumerate(PRINTED):
        passes = {j.name: j.passed for j in node.jobs}
        assert tuple(passes[name] for name in "ABCDE") == PASSES[t]
        assert "".join(sorted(node.quantum())) == ran
    assert "".join(sorted(node.quantum())) == "ABD"
    assert {j.passed for j in node.jobs} == {8}


def test_exactly_ten_of_all_tie_orders_give_the_printed_table():
    fit = set()
    for order in permutations("ABCDE"):
        node = gangs(order)
        if all("".join(sorted(node.quantum())) == ran for ran in PRINTED):
            fit.add("".join(order))
    assert fit == {
        "EABCD", "EACBD", "EACDB", "EBACD", "EBCAD", "EBCDA", "ECABD", "ECADB", "ECBAD", "ECBDA",
    }  # fmt: skip


@pytest.mark.parametrize("order", ["EABCD", "ABCDE", "DCBAE"])
def test_fairness_does_not_depend_on_the_tie_order(order):
    node = gangs(order)
    had = dict.fromkeys("ABCDE", 0)
    for _ in range(1000):
        for name in node.quantum():
            had[name] += SIZES[name]
    assert sum(had.values()) == 4000
    assert all(abs(g - 800) <= 4 for g in had.values())


jobs = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(jobs)
def test_no_gang_starves_and_nothing_idles_that_a_waiting_gang_fits(claims):
    node = GangStride(8, [Strider(f"j{i}", F(t), s) for i, (s, t) in enumerate(claims)])
    sizes = {j.name: j.size_gpus for j in node.jobs}
    longest = {j.name: 0 for j in node.jobs}
    since = dict(longest)
    total = sum(t for _, t in claims)
    for _ in range(200):
        ran = node.quantum()
        left = 8 - sum(sizes[name] for name in ran)
        assert left >= 0
        for name in sizes:
            since[name] = 0 if name in ran else since[name] + 1
            longest[name] = max(longest[name], since[name])
            assert name in ran or sizes[name] > left
    for (size, tickets), name in zip(claims, sizes):
        # Its pass grows by size/tickets a turn; all others pass it by at most once each in the meantime.
        assert longest[name] <= size * total / tickets + sum(s for s, _ in claims) + 8


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(1, 3))
def test_equal_gangs_are_never_off_their_due_by_more_than_the_bound_of_stride(tickets, size):
    """Ahead of its due by one gang's quantum at most; behind by its part of a quantum of each of the others.

    No two jobs' passes differ by more than a stride, hence both (Waldspurger & Weihl: the error against any
    one other job is a quantum, against the ideal it grows with the number of jobs).
    """
    node = GangStride(size, [Strider(f"j{i}", F(t), size) for i, t in enumerate(tickets)])
    had = [0] * len(tickets)
    for quantum in range(1, 120):
        for name in node.quantum():
            had[int(name[1:])] += size
        for i, t in enumerate(tickets):
            part = F(t, sum(tickets))
            assert -part * (len(tickets) - 1) * size <= had[i] - size * quantum * part <= size
            for j, other in enumerate(tickets):
                assert abs(F(had[i], t) - F(had[j], other)) <= F(size, min(t, other))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_coming_going_and_new_tickets_leave_everybody_elses_lag_alone(data):
    node = GangStride(4, [Strider("j0", F(1), 1)])
    made, away = 1, {}
    for _ in range(40):
        step = data.draw(st.sampled_from(["run", "run", "join", "leave", "tickets", "back"]))
        lags = {j.name: node.lag(j.name) for j in node.jobs}
        touched = None
        if step == "run":
            before = sum(lags.values(), F(0))
            node.quantum()
            after = sum((node.lag(j.name) for j in node.jobs), F(0))
            assert before == after  # what some are given beyond their due others lack
            continue
        if step == "join":
            touched = f"j{made}"
            node.join(Strider(touched, F(data.draw(st.integers(1, 9))), data.draw(st.integers(1, 4))))
            assert node.lag(touched) == 0
            made += 1
        elif step == "leave" and node.jobs:
            touched = data.draw(st.sampled_from([j.name for j in node.jobs]))
            job = next(j for j in node.jobs if j.name == touched)
            away[touched] = (job, node.leave(touched))
            assert away[touched][1] == lags[touched]
        elif step == "back" and away:
            touched = data.draw(st.sampled_from(sorted(away)))
            job, lag = away.pop(touched)
            node.join(job, lag)
            assert node.lag(touched) == lag
        elif step == "tickets" and node.jobs:
            name = data.draw(st.sampled_from([j.name for j in node.jobs]))
            node.retickets(name, F(data.draw(st.integers(1, 9))))
        for job in node.jobs:
            if job.name != touched:
                assert node.lag(job.name) == lags[job.name]


def test_a_newcomer_does_not_get_the_node_to_itself():
    node = GangStride(1, [Strider("old", F(1))])
    for _ in range(100):
        node.quantum()
    node.join(Strider("new", F(1)))
    assert [node.quantum()[0] for _ in range(6)].count("new") == 3


@pytest.mark.parametrize("tickets", [0, -2])
def test_a_job_without_tickets_is_refused(tickets):
    with pytest.raises(ShoalError, match="positive"):
        Strider("a", F(tickets))


def test_a_gang_too_big_for_its_node_is_refused_with_a_remedy():
    with pytest.raises(ShoalError, match="central scheduler"):
        GangStride(4).join(Strider("a", F(1), 8))
