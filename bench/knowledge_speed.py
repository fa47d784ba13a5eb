"""Error of learned speeds: parameter-server runs compared with the reference table, all-reduce runs held out."""

from __future__ import annotations

import time

import numpy as np

from knowledge_data import POLLUX, config_speed, pollux_steps, print_json, require_data
from shoal.knowledge.next_sample import next_sample
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_fit import SpeedFit, fit_speed
from shoal.knowledge.speed_models import ALL_REDUCE, SYNC_PS, SpeedModel
from shoal.knowledge.unknown import Unknown

# Mean relative error in percent: of a fit to all rows, and with 10 random rows (reference, section B.9).
REFERENCE = {
    "cnn-text-classification": (3.1, 4.6),
    "dssm": (4.9, 6.5),
    "inception-bn": (4.8, 6.7),
    "resnet-50": (9.6, 12.1),
    "resnext-110": (6.8, 8.4),
    "seq2seq": (9.7, 13.1),
    "vgg-16": (11.3, 14.1),
    "wlm": (9.1, 11.8),
}
POINTS = 10
DRAWS = 200


def fitted(model: SpeedModel, configs: np.ndarray, seconds: np.ndarray, **options) -> SpeedFit:
    fit = fit_speed(model, configs, seconds, min_points=1, **options)
    assert not isinstance(fit, Unknown), str(fit)
    return fit


def random_points(model: SpeedModel, configs: np.ndarray, seconds: np.ndarray, seed: int) -> dict:
    """Mean relative errors of speed over draws of 10 rows: with and without override, on held-out rows."""
    rng = np.random.default_rng(seed)
    errors = {"measured_override": [], "fit_only": [], "held_out": []}
    for _ in range(DRAWS):
        chosen = rng.choice(len(seconds), POINTS, replace=False)
        error = relative_error(fitted(model, configs[chosen], seconds[chosen]), configs, seconds)
        errors["fit_only"].append(error.mean())
        held_out = np.delete(error, chosen)
        errors["held_out"].append(held_out.mean())
        errors["measured_override"].append(held_out.sum() / len(error))
    return {name: percent(np.mean(values)) for name, values in errors.items()}


def chosen_points(
    model: SpeedModel, configs: np.ndarray, seconds: np.ndarray, seed: int, draws: int = 20
) -> dict:
    """The same with points chosen one by one to reduce the uncertainty, starting from two random ones."""
    rng = np.random.default_rng(seed)
    errors = []
    for _ in range(draws):
        chosen = list(rng.choice(len(seconds), 2, replace=False))
        while len(chosen) < POINTS:
            fit = fitted(model, configs[chosen], seconds[chosen], reference=configs)
            left = np.setdiff1d(np.arange(len(seconds)), chosen)
            pick = next_sample(fit, configs[left], configs)
            assert not isinstance(pick, Unknown)
            chosen.append(int(left[pick.index]))
        error = relative_error(fitted(model, configs[chosen], seconds[chosen]), configs, seconds)
        errors.append(np.delete(error, chosen).mean())
    return {"held_out_chosen": percent(np.mean(errors))}


def relative_error(fit: SpeedFit, configs: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return np.abs(seconds / fit.seconds(configs) - 1.0)


def percent(value: float) -> float:
    return round(100 * float(value), 1)


def parameter_servers() -> dict:
    table = {}
    for model, (configs, speed) in sorted(config_speed().items()):
        seconds = 1.0 / speed
        every = relative_error(fitted(SYNC_PS, configs, seconds), configs, seconds).mean()
        at_all, at_ten = REFERENCE[model]
        table[model] = {
            "rows": len(seconds),
            "all_rows": percent(every),
            "reference_all_rows": at_all,
            **random_points(SYNC_PS, configs, seconds, seed=9973),
            **chosen_points(SYNC_PS, configs, seconds, seed=9973),
            "reference_10_points": at_ten,
        }
        table[model]["no_worse"] = table[model]["measured_override"] <= at_ten
    return table


def all_reduce() -> dict:
    table = {}
    for model in POLLUX:
        parts = {which: pollux_steps(model, which) for which in ("placements", "scalability")}
        parts["both"] = tuple(np.concatenate(arrays) for arrays in zip(*parts.values()))
        table[model] = {}
        for which, (configs, seconds) in parts.items():
            every = relative_error(fitted(ALL_REDUCE, configs, seconds), configs, seconds).mean()
            table[model][which] = {
                "rows": len(seconds),
                "all_rows": percent(every),
                **random_points(ALL_REDUCE, configs, seconds, seed=1),
                **chosen_points(ALL_REDUCE, configs, seconds, seed=1, draws=5),
            }
    return table


def fit_times() -> dict:
    times = {}
    configs, speed = config_speed()["resnet-50"]
    for points in (5, 10, 50, 210):
        started, repeats = time.perf_counter(), 300
        for _ in range(repeats):
            fit_speed(SYNC_PS, configs[:points], 1.0 / speed[:points])
        times[f"{points}_points"] = round((time.perf_counter() - started) / repeats * 1000, 3)
    return times


def online_times() -> dict:
    """Time of one more measurement and a new table of 64 shares, and of an unchanged table."""
    known = SpeedEstimator(64, 4, batch_size=256.0)
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        known.observe(gpus, -(-gpus // 4), "v100", 0.1 + 10 / gpus)
    started, repeats = time.perf_counter(), 300
    for _ in range(repeats):
        known.observe(8, 2, "v100", 1.4)
        known.table("v100")
    between = time.perf_counter()
    for _ in range(repeats):
        known.table("v100")
    again = time.perf_counter() - between
    return {
        "observe_and_table": round((between - started) / repeats * 1000, 3),
        "table_again": round(again / repeats * 1000, 4),
    }


if __name__ == "__main__":
    require_data()
    print_json(
        {
            "errors_in": f"percent of speed, mean over {DRAWS} draws of {POINTS} points",
            "sync_parameter_servers": parameter_servers(),
            "all_reduce": all_reduce(),
            "ms_per_fit": fit_times(),
            "ms_per_fit_wanted": 5,
            "ms_online": online_times(),
        }
    )
