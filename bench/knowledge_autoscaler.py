"""The autoscaler on measured scaling curves with noise: trials, time until the final size, and its correctness.

The right size is the result of the rule on the curve without noise: the size before the first step that fails.
Many measured curves are not monotonic; there a search may also end at another size where the step into it passes
and the step out of it fails: a stopping size. A run starts at the smallest or the largest measured size and lasts
1,500 steps. Every resize stops the job for the paper's measured idle time; some steps hang. The share of the total
time is that of a job that needs half an hour at its right size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from knowledge_data import print_json, require_data, scaling_curves
from shoal.knowledge.autoscaler import IMPROVED, Autoscaler, Options
from shoal.knowledge.heuristics import (
    Heuristic,
    Point,
    Progress,
    ScalingEfficiency,
    UtilityAgainstCost,
)

Curve = dict[int, tuple[float, float]]
IDLE_UP_S, IDLE_DOWN_S = 3.179, 2.612  # CIFAR-10, slides of the paper
JOB_S = 1800.0
WATCHED_STEPS = 1500
REPEATS = 3


def right_size(curve: Curve, heuristic: Heuristic, progress: Progress) -> int:
    sizes = sorted(curve)
    points = [Point(k, curve[k][1] / curve[k][0], 0.0, 1000) for k in sizes]
    for smaller, larger in pairwise(points):
        if not heuristic.judge(smaller, larger, progress).passes:
            return smaller.gpus
    return sizes[-1]


def is_stopping(size: int, curve: Curve, heuristic: Heuristic, progress: Progress) -> bool:
    """Whether the step into the size passes and the step out of it fails (the ends need one of the two)."""
    points = [Point(k, curve[k][1] / curve[k][0], 0.0, 1000) for k in sorted(curve)]
    return all(
        heuristic.judge(smaller, larger, progress).passes == (larger.gpus == size)
        for smaller, larger in pairwise(points)
        if size in (smaller.gpus, larger.gpus)
    )


def run(
    curve: Curve, options: Options, heuristic: Heuristic, start: int, noise: float, rng, total: float
) -> dict:
    """Train for the given number of steps, carry out the engine's decisions, and record the time of the last resize."""
    engine = Autoscaler(start, options, heuristic)
    gpus, now_s, found_s, trials, done = start, 0.0, 0.0, 0, 0.0
    for _ in range(WATCHED_STEPS):
        step_s, samples = curve[gpus]
        step_s *= np.exp(rng.normal(0, noise)) * (3.0 if rng.random() < 0.005 else 1.0)
        now_s += step_s
        done += samples
        engine.observe(gpus, step_s, samples)
        decision = engine.decide(Progress(now_s, max(total - done, 1.0)))
        if decision.gpus != gpus:
            now_s += IDLE_UP_S if decision.gpus > gpus else IDLE_DOWN_S
            gpus, found_s, trials = decision.gpus, now_s, trials + 1
    return {"gpus": gpus, "found_s": found_s, "trials": trials}


def study(curves: dict[str, Curve], options: Options, make, noise: float, largest_first: bool) -> dict:
    outcomes = []
    for number, curve in enumerate(curves.values()):
        sizes = tuple(sorted(curve))
        fitting = replace(options, sizes=sizes, min_gpus=sizes[0], max_gpus=sizes[-1])
        heuristic, total, right = make(curve)
        for repeat in range(REPEATS):
            rng = np.random.default_rng([number, repeat])
            start = sizes[-1] if largest_first else sizes[0]
            outcome = run(curve, fitting, heuristic, start, noise, rng, total)
            outcome["off_by"] = abs(sizes.index(outcome["gpus"]) - sizes.index(right))
            outcome["stops"] = is_stopping(outcome["gpus"], curve, heuristic, Progress(0.0, total))
            outcome["share"] = outcome["found_s"] / (JOB_S + outcome["found_s"])
            outcomes.append(outcome)
    column = {name: np.array([o[name] for o in outcomes], dtype=float) for name in outcomes[0]}
    return {
        "runs": len(outcomes),
        "right_size": round(float((column["off_by"] == 0).mean()), 3),
        "right_or_another_stopping_size": round(float(column["stops"].mean()), 3),
        "within_one_size": round(float((column["off_by"] <= 1).mean()), 3),
        "mean_trials": round(float(column["trials"].mean()), 1),
        "mean_time_s": round(float(column["found_s"].mean()), 1),
        "median_time_s": round(float(np.median(column["found_s"])), 1),
        "max_time_s": round(float(column["found_s"].max()), 1),
        "median_share_percent": round(100 * float(np.median(column["share"])), 1),
        "mean_share_percent": round(100 * float(column["share"].mean()), 1),
    }


def by_efficiency(threshold: float):
    def make(curve: Curve):
        heuristic = ScalingEfficiency(threshold)
        right = right_size(curve, heuristic, Progress())
        return heuristic, JOB_S * curve[right][1] / curve[right][0], right

    return make


def by_utility(curve: Curve):
    """An hour on one GPU costs 1; finishing at once is worth ten times the cost of the one-GPU run."""
    smallest = min(curve)
    total = JOB_S * 4 * curve[smallest][1] / curve[smallest][0]
    alone_s = 4 * JOB_S
    heuristic = UtilityAgainstCost((10 * smallest * alone_s / 3600, 0.0), (0.0, 2 * alone_s))
    return heuristic, total, right_size(curve, heuristic, Progress(0.0, total))


if __name__ == "__main__":
    require_data()
    curves = scaling_curves()
    cases = {
        "efficiency_0.1": by_efficiency(0.1),
        "efficiency_0.5": by_efficiency(0.5),
        "utility": by_utility,
    }
    print_json(
        {
            "curves": len(curves),
            "paper": {"cifar10_mean_s": 61.0, "imagenet_mean_s": 264, "share_percent": "< 6 and < 2"},
            "results": {
                f"{name}, noise {100 * noise:.0f} %, from the {'largest' if down else 'smallest'}": {
                    "authors_rules": study(curves, Options(), make, noise, down),
                    "improved": study(curves, IMPROVED, make, noise, down),
                }
                for name, make in cases.items()
                for noise, down in ((0.05, False), (0.2, False), (0.05, True))
            },
        }
    )
