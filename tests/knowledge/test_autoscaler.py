"""The autoscaling engine: the authors' rules case by case, then whole searches on curves with noise."""

import csv
import json
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.knowledge.autoscaler import IMPROVED, Autoscaler, Options
from shoal.knowledge.climb import Rules, aim_for, ladder
from shoal.knowledge.heuristics import (
    Point,
    Progress,
    ScalingEfficiency,
    Utility,
    UtilityAgainstCost,
    Verdict,
    find_heuristic,
)
from shoal.knowledge.unknown import Unknown

SIZES = (4, 8, 12, 16, 20)


def points(*pairs: tuple[int, float], steps: int = 200) -> list[Point]:
    return [Point(gpus, throughput, 0.0, steps) for gpus, throughput in pairs]


def aim(seen: list[Point], now: int, rules: Rules | None = None, sizes=SIZES, settled: int | None = None):
    found = aim_for(seen, now, sizes, rules or Rules(), ScalingEfficiency(0.5), Progress(), settled)
    return found.gpus, found.code


def test_scaling_efficiency_of_the_slides_example_is_0_8():
    verdict = ScalingEfficiency(0.1).judge(*points((4, 400), (5, 480)), Progress())
    assert verdict.margin == pytest.approx(0.8 - 0.1)
    assert verdict.passes


@pytest.mark.parametrize(("larger", "efficiency"), [(800, 1.0), (400, 0.0), (200, -0.5)])
def test_scaling_efficiency_is_one_when_perfect_and_negative_when_slower(larger, efficiency):
    verdict = ScalingEfficiency(0.0).judge(*points((4, 400), (8, larger)), Progress())
    assert verdict.margin == pytest.approx(efficiency)


AUTHORS_RULES = [
    ("one size seen: a step up", points((8, 80)), 8, (12, "Climb")),
    ("one size seen, the largest: a step down", points((20, 80)), 20, (16, "Descend")),
    ("all pass: on from the largest", points((4, 40), (8, 80)), 8, (12, "Climb")),
    ("all pass up to the most allowed: stay there", points((16, 160), (20, 200)), 20, (20, "Settle")),
    ("fails with a smaller size open: down", points((8, 80), (12, 81)), 12, (4, "Descend")),
    ("fails at the bottom: back to the size before", points((4, 40), (8, 80), (12, 81)), 12, (8, "Settle")),
    ("fails between: before the first failure", points((4, 40), (8, 41), (12, 80)), 12, (4, "Settle")),
    (
        "three passes at the bottom: no look below",
        points((8, 80), (12, 120), (16, 160), (20, 200), (24, 201)),
        24,
        (20, "Settle"),
    ),
]


@pytest.mark.parametrize(
    ("name", "seen", "now", "expected"), AUTHORS_RULES, ids=[c[0] for c in AUTHORS_RULES]
)
def test_the_authors_rules(name, seen, now, expected):
    sizes = (*SIZES, 24, 28) if now == 24 else SIZES
    assert aim(seen, now, sizes=sizes) == expected


def test_before_settling_the_next_size_gets_a_hundred_steps():
    seen = [*points((4, 40), (8, 80)), Point(12, 81, 0.0, 99)]
    assert aim(seen, 12) == (12, "Gather")
    assert aim([*seen[:2], Point(12, 81, 0.0, 100)], 12) == (8, "Settle")


def test_the_engines_numbers_are_the_authors():
    options = Options()
    assert (options.min_gpus, options.max_gpus, options.step_gpus, options.decide_every_steps) == (
        4,
        60,
        4,
        10,
    )
    assert (options.rules.passes_before_settling, options.rules.steps_at_next) == (3, 100)
    assert ScalingEfficiency().threshold == 0.1


def test_doubling_halves_the_gap_in_which_the_first_failure_lies():
    rules = Rules(doubling=True, steps_at_next=0, passes_before_settling=1)
    sizes = ladder(1, 64, 1)

    def go(seen, now):
        return aim(seen, now, rules, sizes)

    assert go(points((4, 4)), 4) == (8, "Climb")
    assert go(points((4, 4), (8, 8)), 8) == (16, "Climb")
    assert go(points((4, 4), (8, 8), (16, 8.5)), 16) == (12, "Descend")
    assert go(points((4, 4), (8, 8), (12, 8.2), (16, 8.5)), 12) == (10, "Descend")
    assert go(points((8, 8), (10, 10), (11, 10.1), (12, 10.2)), 11) == (9, "Descend"), (
        "9 to 10 was not judged"
    )
    assert go(points((8, 8), (9, 9), (10, 10), (11, 10.1), (12, 10.2)), 9) == (10, "Settle")


def test_a_verdict_within_its_noise_is_measured_on_up_to_a_limit():
    rules = Rules(confidence=2.0, sure_after_steps=100, steps_at_next=0)
    noisy = [Point(4, 40, 0.05, 50), Point(8, 61, 0.05, 50)]
    assert aim(noisy, 8, rules) == (8, "Measuring")
    assert aim([noisy[0], replace(noisy[1], steps=100)], 8, rules) == (12, "Climb")
    assert aim([noisy[0], replace(noisy[1], throughput=80)], 8, rules) == (12, "Climb")


def test_hysteresis_keeps_a_settled_size_against_small_changes():
    rules = Rules(hysteresis=0.1, steps_at_next=0, passes_before_settling=1)
    barely = points((4, 40), (8, 80), (12, 101))  # efficiency 0.525 against 0.5
    assert aim(barely, 8, rules, settled=None) == (16, "Climb")
    assert aim(barely, 8, rules, settled=8) == (8, "Settle")
    assert aim(points((4, 40), (8, 58)), 8, rules, sizes=(4, 8), settled=8) == (8, "Settle")
    assert aim(points((4, 40), (8, 58)), 8, rules, sizes=(4, 8), settled=None) == (4, "Settle")


def test_utility_is_straight_between_its_points_and_goes_on_falling():
    utility = Utility.linear(100.0, 50.0)
    assert [utility.at(t) for t in (0, 25, 50, 75)] == [100, 50, 0, -50]
    steps = Utility(((0, 10), (10, 10), (20, 5))).until(30)
    assert [steps.at(t) for t in (5, 15, 25, 30, 40)] == [10, 7.5, 2.5, 0, -5]
    assert Utility(((0, 10), (10, 10), (20, 5))).until(15).at(25) == 2.5
    with pytest.raises(ValueError, match="increasing order"):
        Utility(((10, 1), (5, 2)))


def test_utility_against_cost_compares_worth_with_price():
    """1000 samples left: 100 s on 4 GPUs, 62.5 s on 8: worth 37.5 more, at 0.1 per GPU-second 10 dearer."""
    heuristic = UtilityAgainstCost((1000, 0), (0, 1000), price_per_gpu_hour=360.0)
    verdict = heuristic.judge(*points((4, 10), (8, 16)), Progress(0.0, 1000.0))
    assert verdict.margin == pytest.approx(37.5 - 10)
    dear = UtilityAgainstCost((1000, 0), (0, 1000), price_per_gpu_hour=3600.0)
    assert not dear.judge(*points((4, 10), (8, 16)), Progress(0.0, 1000.0)).passes
    assert isinstance(heuristic.judge(*points((4, 10), (8, 16)), Progress()), Unknown)


def run(
    engine: Autoscaler, seconds, samples=lambda k: 64.0, steps: int = 1200, noise: float = 0.0, seed: int = 0
):
    """Train with `seconds(k)` per step, obeying the engine; returns the sizes in the order they were used."""
    rng = np.random.default_rng(seed)
    sizes = [engine.gpus]
    for _ in range(steps):
        gpus = sizes[-1]
        engine.observe(gpus, seconds(gpus) * float(np.exp(rng.normal(0, noise))), samples(gpus))
        target = engine.decide().gpus
        if target != gpus:
            sizes.append(target)
    return sizes


def amdahl(k: int) -> float:
    """The step from 8 to 12 GPUs has an efficiency of 0.54, that from 12 to 16 one of 0.47."""
    return 0.07 + 1.0 / k


def last_passing(seconds, sizes, threshold: float) -> int:
    for smaller, larger in pairwise(sizes):
        gain = (seconds(smaller) / seconds(larger) - 1) * smaller / (larger - smaller)
        if gain <= threshold:
            return smaller
    return sizes[-1]


@pytest.mark.parametrize("options", [Options(), IMPROVED], ids=["authors", "improved"])
@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("start", [4, 20, 60])
def test_without_noise_every_search_ends_at_the_latest_size_that_passes(options, threshold, start):
    engine = Autoscaler(start, options, ScalingEfficiency(threshold))
    sizes = run(engine, amdahl, steps=3000)
    assert sizes[-1] == last_passing(amdahl, range(4, 61, 4), threshold)


def test_doubling_needs_fewer_changes_of_size_than_walking():
    walked = run(Autoscaler(4, Options(), ScalingEfficiency(0.1)), amdahl)
    doubled = run(Autoscaler(4, IMPROVED, ScalingEfficiency(0.1)), amdahl)
    assert walked[-1] == doubled[-1]
    assert len(doubled) < len(walked)


def test_noisy_searches_end_near_the_right_size():
    ends = [
        run(Autoscaler(4, IMPROVED, ScalingEfficiency(0.5)), amdahl, noise=0.05, seed=seed)[-1]
        for seed in range(20)
    ]
    assert np.mean([abs(end - 12) <= 4 for end in ends]) >= 0.9


def test_the_first_step_after_a_change_of_size_is_left_out():
    engine = Autoscaler(4, Options(decide_every_steps=2), ScalingEfficiency(0.5))
    for step_s in (99.0, 1.0, 1.0):
        engine.observe(4, step_s, 64.0)
    decision = engine.decide()
    assert decision.gpus == 8
    for step_s in (99.0, 0.5, 0.5):
        engine.observe(8, step_s, 64.0)
    assert engine.decide().gpus == 12, (
        "128 samples/s against 64: perfect scaling, had the first step counted it fails"
    )


def test_while_a_change_is_under_way_nothing_else_is_decided():
    engine = Autoscaler(4, Options(decide_every_steps=1))
    for _ in range(2):
        engine.observe(4, 1.0, 64.0)
    assert engine.decide().code == "Climb"
    engine.observe(4, 1.0, 64.0)
    assert (engine.decide().gpus, engine.decide().code) == (8, "Waiting")


def test_a_refused_change_is_not_asked_for_again_until_conditions_change():
    engine = Autoscaler(4, Options(decide_every_steps=1, max_gpus=8))
    for _ in range(2):
        engine.observe(4, 1.0, 64.0)
    assert engine.decide().gpus == 8
    engine.resize_refused()
    engine.observe(4, 1.0, 64.0)
    assert engine.decide().gpus == 4
    engine.conditions_changed()
    engine.observe(4, 1.0, 64.0)
    assert engine.decide().gpus == 8


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"min_gpus": 4, "max_gpus": 12}, (4, 8, 12)),
        ({"min_gpus": 4, "max_gpus": 60, "max_global_batch": 10}, (4, 8)),
        ({"min_gpus": 4, "max_gpus": 60, "max_global_batch": 256, "min_local_batch": 32}, (4, 8)),
        ({"min_gpus": 2, "max_gpus": 9, "sizes": (1, 2, 4, 8, 16)}, (2, 4, 8)),
        ({"min_gpus": 4, "max_gpus": 60, "max_global_batch": 3}, ()),
    ],
)
def test_sizes_respect_min_max_and_the_batch_limit(limits, sizes):
    assert Autoscaler(4, Options(**limits)).sizes == sizes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([Options(), IMPROVED]),
    st.integers(1, 70),
    st.integers(1, 20),
    st.integers(0, 40),
    st.integers(1, 6),
    st.integers(0, 1000),
)
def test_no_search_leaves_its_limits_or_goes_on_for_ever(options, start, lowest, span, step, seed):
    rng = np.random.default_rng(seed)
    limits = replace(
        options,
        min_gpus=lowest,
        max_gpus=lowest + span,
        step_gpus=step,
        recheck_change=None,
        decide_every_steps=3,
    )
    curve = dict(zip(range(1, 100), rng.uniform(0.1, 2.0, 99)))
    engine = Autoscaler(start, limits, ScalingEfficiency(float(rng.uniform(0, 1))))
    sizes = run(engine, curve.__getitem__, steps=1500)
    assert all(lowest <= k <= lowest + span for k in sizes[1:])
    settled = sizes[-1]
    assert run(engine, curve.__getitem__, steps=300)[-1] == settled, (
        "a settled search stays without new facts"
    )


def test_when_the_speed_changes_the_search_opens_again():
    engine = Autoscaler(4, IMPROVED, ScalingEfficiency(0.5))
    assert run(engine, amdahl)[-1] == 12
    crowded = run(engine, lambda k: 0.3 + 1.0 / k)  # the network became six times slower
    assert crowded[-1] == 4
    assert run(engine, amdahl)[-1] == 12


def test_the_authors_engine_can_be_told_that_conditions_changed():
    engine = Autoscaler(4, Options(), ScalingEfficiency(0.5))
    assert run(engine, amdahl)[-1] == 12
    engine.conditions_changed(max_gpus=8)
    assert run(engine, amdahl)[-1] == 8


def test_a_change_that_does_not_pay_in_what_remains_is_not_made():
    options = replace(IMPROVED, transition_s=30.0)
    engine = Autoscaler(4, options, ScalingEfficiency(0.5))
    for _ in range(11):
        engine.observe(4, 1.0, 64.0)
    almost_done = engine.decide(Progress(1000.0, 64.0 * 20))
    assert (almost_done.gpus, almost_done.code) == (4, "NotWorthIt")
    for _ in range(10):
        engine.observe(4, 1.0, 64.0)
    assert engine.decide(Progress(1000.0, 64.0 * 20_000)).gpus == 8


@pytest.mark.parametrize(
    ("step_s", "samples"), [(0.0, 64), (-1.0, 64), (float("nan"), 64), (1.0, 0), (float("inf"), 1)]
)
def test_a_step_that_cannot_be_is_left_out_with_a_reason(step_s, samples):
    engine = Autoscaler(4)
    assert isinstance(engine.observe(4, step_s, samples), Unknown)
    assert engine.decide().code == "Measuring"


def test_unknown_remaining_work_keeps_the_size_and_says_why():
    engine = Autoscaler(4, Options(decide_every_steps=1), UtilityAgainstCost((1, 0), (0, 1)))
    for gpus in (4, 4, 8, 8):
        engine.observe(gpus, 1.0, 64.0)
    decision = engine.decide()
    assert decision.gpus == 8
    assert "remaining work" in decision.why


def test_the_state_survives_saving_as_json_at_any_moment():
    engine = Autoscaler(4, IMPROVED, ScalingEfficiency(0.5))
    rng = np.random.default_rng(0)
    gpus = 4
    for _ in range(400):
        engine.observe(gpus, amdahl(gpus) * float(np.exp(rng.normal(0, 0.1))), 64.0)
        again = Autoscaler.from_dict(
            json.loads(json.dumps(engine.to_dict())), IMPROVED, ScalingEfficiency(0.5)
        )
        decision = engine.decide()
        assert again.decide() == decision
        gpus = decision.gpus


class AlwaysGrow:
    def judge(self, smaller: Point, larger: Point, progress: Progress) -> Verdict:
        return Verdict(1.0, 0.0, "always")


def test_a_custom_heuristic_is_found_by_its_entry_point_and_used():
    here = f"{__name__}:AlwaysGrow"
    made = find_heuristic("grow", [EntryPoint("grow", here, "shoal.heuristics")])
    engine = Autoscaler(4, replace(IMPROVED, max_gpus=16), made())
    assert run(engine, lambda k: 1.0)[-1] == 16


@pytest.mark.parametrize(
    ("name", "target", "why"),
    [
        ("other", "os:getcwd", "there is no heuristic named other; there are broken, efficiency, utility"),
        ("broken", "no.such.module:thing", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_heuristic_that_cannot_be_had_is_unknown_and_says_why(name, target, why):
    answer = find_heuristic(name, [EntryPoint("broken", target, "shoal.heuristics")])
    assert isinstance(answer, Unknown)
    assert why in answer.why
    assert find_heuristic("efficiency") is ScalingEfficiency


def measured_curves(shared_data) -> dict[str, dict[int, float]]:
    """Seconds per step by GPUs: the AFS profiles and ElasticFlow's tables, a curve for each batch size."""
    curves: dict[str, dict[int, float]] = {}
    for row in csv.DictReader((shared_data / "afs" / "profiles.csv").open()):
        curves.setdefault(row["model"], {})[int(row["gpus"])] = float(row["seconds_per_iteration"])
    for path in sorted(shared_data.glob("elasticflow/throughputs_*/*.csv")):
        for row in csv.DictReader(path.open()):
            name = f"{path.parent.name}/{path.stem}-{row.pop('global_batch_size')}"
            curves[name] = {int(k): 1 / float(v) for k, v in row.items() if v and float(v) > 0}
    return {name: curve for name, curve in curves.items() if len(curve) >= 4}


@pytest.mark.reference
@pytest.mark.parametrize(
    ("options", "often"), [(Options(), 0.9), (IMPROVED, 0.8)], ids=["authors", "improved"]
)
def test_on_measured_curves_with_noise_most_searches_end_at_the_right_size(shared_data, options, often):
    curves = measured_curves(shared_data)
    right = []
    for number, curve in enumerate(curves.values()):
        sizes = tuple(sorted(curve))
        limits = replace(options, sizes=sizes, min_gpus=sizes[0], max_gpus=sizes[-1])
        engine = Autoscaler(sizes[0], limits, ScalingEfficiency(0.1))
        end = run(engine, curve.__getitem__, steps=1000, noise=0.05, seed=number)[-1]
        right.append(end == last_passing(curve.__getitem__, sizes, 0.1))
    assert len(right) >= 30
    assert np.mean(right) >= often
