"""Error of a job's speed curve after 1, 2, 3, 5 and 10 measured sizes, and how often its 90 % interval is right.

    python bench/knowledge_sizes.py

scaling: speed by number of GPUs (ElasticFlow and Pollux), through `SpeedEstimator`, as the live server and the
simulator learn it. runs: all measured configurations of Pollux (GPUs, nodes, samples per GPU). servers: the
configurations (servers, workers) of DL2. Every measurement has 5 % noise. Sizes are drawn at random, or chosen one by
one by `next_sample` from a random first one, as the scheduler does. Optimus reports less than 10 %.
"""

from __future__ import annotations

import numpy as np

from knowledge_data import POLLUX, config_speed, pollux_steps, print_json, require_data, scaling_curves
from shoal.knowledge.next_sample import next_sample
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_fit import fit_speed
from shoal.knowledge.speed_models import ALL_REDUCE, SYNC_PS, SpeedModel
from shoal.knowledge.speed_prior import WITHIN
from shoal.knowledge.unknown import Unknown

COUNTS = (1, 2, 3, 5, 10)
NOISE = 0.05
DRAWS = 20
PER_NODE = 4

Errors = dict[int, list[tuple[float, float]]]


def scaling(
    curve: dict[int, float],
    local_batch: float | None,
    chooses: bool,
    rng: np.random.Generator,
    errors: Errors,
) -> None:
    """One draw: measure size after size of a curve {gpus: seconds}, and note the error of the other sizes.

    With a `local_batch` the batch grows with the GPUs.
    """
    batch = (
        {} if local_batch is None else {"batch_size": local_batch, "max_batch_size": local_batch * max(curve)}
    )
    known = SpeedEstimator(max(curve), PER_NODE, **batch)
    left = list(rng.permutation(sorted(curve)).tolist())
    for count in range(1, min(len(curve), max(COUNTS) + 1)):
        pick: int | Unknown = known.next_gpus("gpu", left) if chooses and count > 1 else left[0]
        assert not isinstance(pick, Unknown)
        left.remove(pick)
        seconds = curve[pick] * float(np.exp(rng.normal(0.0, NOISE)))
        known.observe(pick, -(-pick // PER_NODE), "gpu", seconds)
        if count in COUNTS:
            table = known.table("gpu")
            assert not isinstance(table, Unknown)
            true, (low, high) = np.array([1.0 / curve[n] for n in left]), table.interval()
            error = np.abs(table.iterations_per_s[left] / true - 1.0)
            within = (low[left] <= true) & (true <= high[left])
            errors.setdefault(count, []).append((float(error.mean()), float(within.mean())))


def fits(
    model: SpeedModel,
    configs: np.ndarray,
    seconds: np.ndarray,
    chooses: bool,
    rng: np.random.Generator,
    errors: Errors,
) -> None:
    """The same for a model's configurations."""
    chosen: list[int] = []
    for count in range(1, max(COUNTS) + 1):
        left = np.setdiff1d(np.arange(len(seconds)), chosen)
        pick = int(rng.choice(left))
        if chooses and chosen:
            found = next_sample(fit, configs[left], configs)  # noqa: F821
            assert not isinstance(found, Unknown)
            pick = int(left[found.index])
        chosen.append(pick)
        noisy = seconds[chosen] * np.exp(rng.normal(0.0, NOISE, len(chosen)))
        fit = fit_speed(model, configs[chosen], noisy, min_points=1, reference=configs)
        assert not isinstance(fit, Unknown)
        if count in COUNTS:
            rest = np.setdiff1d(np.arange(len(seconds)), chosen)
            ratio = seconds[rest] / fit.seconds(configs[rest])
            within = np.abs(np.log(ratio)) <= WITHIN * fit.relative_std(configs[rest])
            errors.setdefault(count, []).append((float(np.abs(ratio - 1.0).mean()), float(within.mean())))


def summed_up(errors: Errors) -> dict:
    return {
        f"{count}_sizes": {
            "mean_error_percent": round(100 * float(np.mean([e for e, _ in of])), 1),
            "median_error_percent": round(100 * float(np.median([e for e, _ in of])), 1),
            "in_90_percent_interval": round(float(np.mean([w for _, w in of])), 2),
            "draws": len(of),
        }
        for count, of in sorted(errors.items())
    }


def of_scaling(source: str) -> dict:
    """Seconds per step by GPUs: with a fixed global batch (ElasticFlow), or a fixed batch per GPU (Pollux)."""
    grows = source == "pollux"
    curves = []
    for name, curve in scaling_curves().items():
        if name.startswith(source):
            first = min(curve)
            seconds = {gpus: seconds for gpus, (seconds, _) in curve.items()}
            curves.append((seconds, curve[first][1] / first if grows else None))
    found = {}
    for name, chooses in (("random", False), ("chosen", True)):
        errors: Errors = {}
        for number, (curve, local_batch) in enumerate(curves):
            for draw in range(DRAWS):
                scaling(curve, local_batch, chooses, np.random.default_rng([number, draw]), errors)
        found[name] = summed_up(errors)
    return {"curves": len(curves), **found}


def of_runs(model: SpeedModel, runs: list[tuple[np.ndarray, np.ndarray]]) -> dict:
    found = {}
    for name, chooses in (("random", False), ("chosen", True)):
        errors: Errors = {}
        for number, (configs, seconds) in enumerate(runs):
            for draw in range(DRAWS):
                fits(model, configs, seconds, chooses, np.random.default_rng([number, draw]), errors)
        found[name] = summed_up(errors)
    return {"models": len(runs), **found}


if __name__ == "__main__":
    require_data()
    pollux = [
        tuple(
            np.concatenate(arrays)
            for arrays in zip(*(pollux_steps(m, w) for w in ("placements", "scalability")))
        )
        for m in POLLUX
    ]
    servers = [(configs, 1.0 / speed) for _, (configs, speed) in sorted(config_speed().items())]
    print_json(
        {
            "errors_in": "percent of speed at the sizes that were not measured; 5 % noise; Optimus: < 10",
            "scaling_elasticflow": of_scaling("elasticflow"),
            "scaling_pollux": of_scaling("pollux"),
            "runs_pollux": of_runs(ALL_REDUCE, pollux),  # type: ignore[arg-type]
            "servers_dl2": of_runs(SYNC_PS, servers),
        }
    )
