"""Stragglers: how often a healthy worker is reported under noise, and how soon a slow one is."""

from __future__ import annotations

import numpy as np

from knowledge_data import print_json
from shoal.wire.messages import Report
from shoal.wire.straggler import StragglerRule

STEPS = 1000
RUNS = 40
VARIANTS = {
    "ours": {},
    "authors_rule": {"from_first": True, "confirm_reports": 1},
}


def times(rng: np.random.Generator, workers: int, noise: float) -> np.ndarray:
    """Compute seconds: lognormal noise, and one step in 200 hangs for four times as long."""
    base = np.exp(rng.normal(0, noise, (STEPS, workers)))
    return base * np.where(rng.random((STEPS, workers)) < 0.005, 4.0, 1.0)


def named(rule: StragglerRule, row: np.ndarray, members: tuple[str, ...]) -> set[str]:
    """The workers that the rule reports after a step with these compute times."""
    reports = ((w, Report(steps=1, samples=8.0, compute_s=s)) for w, s in zip(members, row.tolist()))
    return {found[0] for w, report in reports if (found := rule.observe(w, report, members))}


def false_alarms(options: dict, workers: int, noise: float) -> dict:
    accused, members = 0, tuple(map(str, range(workers)))
    for run in range(RUNS):
        rng = np.random.default_rng([run, workers])
        rule = StragglerRule(**options)
        accused += sum(len(named(rule, row, members)) for row in times(rng, workers, noise))
    return {
        "healthy_workers_ever_accused_percent": round(100 * accused / (RUNS * workers), 2),
        "per_100000_worker_steps": round(1e5 * accused / (RUNS * workers * STEPS), 3),
    }


def delay(options: dict, workers: int, noise: float, slowdown: float) -> dict:
    delays, members = [], tuple(map(str, range(workers)))
    for run in range(RUNS):
        rng = np.random.default_rng([run, workers])
        rule = StragglerRule(**options)
        for step, row in enumerate(times(rng, workers, noise)[:500]):
            row[0] *= slowdown if step >= 100 else 1.0
            if "0" in named(rule, row, members) and step >= 100:
                delays.append(step - 100 + 1)
                break
    return {
        "found_percent": round(100 * len(delays) / RUNS, 1),
        "median_steps": float(np.median(delays)) if delays else None,
    }


if __name__ == "__main__":
    print_json(
        {
            name: {
                "false_alarms": {
                    f"{workers} workers, noise {100 * noise:.0f} %": false_alarms(options, workers, noise)
                    for workers in (4, 16)
                    for noise in (0.05, 0.1, 0.2, 0.3)
                },
                "detection": {
                    f"{slowdown}x slower, noise 10 %": delay(options, 8, 0.1, slowdown)
                    for slowdown in (1.2, 1.333, 1.5, 2.0, 4.0)
                },
            }
            for name, options in VARIANTS.items()
        }
    )
