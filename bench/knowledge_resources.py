"""Resource estimates by training size: Liquid's random forest and four other models, as in the paper's Fig. 10.

The jobs are generated (see shoal.knowledge.synthetic_jobs). The paper's data are not public, so its figures can be
compared by shape only.
"""

from __future__ import annotations

import time

import numpy as np

from knowledge_data import print_json
from shoal.knowledge.features import as_number
from shoal.knowledge.forest import train_forest
from shoal.knowledge.synthetic_jobs import draw_example
from shoal.sim.papers.liquid_estimates import FIG_10, ORDER, TEST_SIZE, TRAINING_SIZES, models

REPEATS = 5
LABELS = ("gpu_mem_mb", "gpu_util", "gpu_util_std", "bw_rx_kb_s", "total_s")


def draw(seed: int, noise: float, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    examples = [draw_example(rng, noise=noise) for _ in range(count)]
    columns = sorted(examples[0].features)
    samples = np.array([[as_number(e.features[c]) for c in columns] for e in examples])
    return samples, {label: np.array([int(e.labels[label]) for e in examples]) for label in LABELS}


def scores(predicted: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """RMSE = sqrt(MSE) and R2 = 1 - MSE / variance of the test set."""
    mse = float(np.mean((predicted - true) ** 2))
    return mse**0.5, 1.0 - mse / float(np.var(true))


def compare(label: str, noise: float) -> dict:
    table = {}
    for size in TRAINING_SIZES:
        found = {name: [] for name in ORDER}
        for seed in range(REPEATS):
            samples, labels = draw(2020 + seed, noise, size + TEST_SIZE)
            target = labels[label]
            for name, fit in models().items():
                predict = fit(samples[:size], target[:size])
                found[name].append(scores(predict(samples[size:]), target[size:]))
        means = {name: np.mean(values, axis=0) for name, values in found.items()}
        table[str(size)] = {
            "rmse": {name: round(float(means[name][0]), 2) for name in ORDER},
            "r2": {name: round(float(means[name][1]), 3) for name in ORDER},
        }
    return table


def times() -> dict:
    samples, labels = draw(1, 0.1, 400)
    started = time.perf_counter()
    forest = train_forest(samples, labels["gpu_mem_mb"], seed=0)
    trained = time.perf_counter()
    for _ in range(100):
        forest.predict(samples[:1])
    return {
        "train_400_jobs_one_label_ms": round(1000 * (trained - started), 1),
        "predict_one_job_one_label_ms": round(10 * (time.perf_counter() - trained), 3),
    }


if __name__ == "__main__":
    print_json(
        {
            "test_jobs": TEST_SIZE,
            "draws": REPEATS,
            "by_noise": {
                f"{100 * noise:.0f}_percent": {label: compare(label, noise) for label in LABELS}
                for noise in (0.1, 0.25)
            },
            "paper_fig_10": {
                str(size): {"rmse": dict(zip(ORDER, rmse)), "r2": dict(zip(ORDER, r2))}
                for size, (rmse, r2) in FIG_10.items()
            },
            **times(),
        }
    )
