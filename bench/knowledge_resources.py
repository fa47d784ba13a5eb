"""Resource estimates by training size: Liquid's random forest and four other models, as in the paper's Fig. 10.

The jobs are generated (see shoal.knowledge.synthetic_jobs). The paper's data are not public, so its figures can be
compared by shape only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from sklearn.ensemble import AdaBoostRegressor, GradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from knowledge_data import print_json
from shoal.knowledge.features import as_number
from shoal.knowledge.forest import MAX_DEPTH, MIN_SAMPLES_LEAF, MIN_SAMPLES_SPLIT, TREES, train_forest
from shoal.knowledge.synthetic_jobs import draw_example

TRAINING_SIZES = (100, 200, 300, 400)
TEST_SIZE = 50
REPEATS = 5
LABELS = ("gpu_mem_mb", "gpu_util", "gpu_util_std", "bw_rx_kb_s", "total_s")
ORDER = ("random_forest", "linear", "adaboost", "gbdt", "decision_tree")
FIG_10 = {
    100: ((1210, 1260, 1390, 1390, 1570), (0.58, 0.54, 0.44, 0.44, 0.30)),
    200: ((1000, 1080, 940, 1030, 1180), (0.72, 0.66, 0.75, 0.69, 0.60)),
    300: ((870, 1030, 1350, 2260, 2390), (0.78, 0.69, 0.48, -0.44, -0.61)),
    400: ((700, 1010, 980, 930, 1040), (0.86, 0.71, 0.72, 0.75, 0.69)),
}


def models() -> dict[str, Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]]:
    """Fit functions. The linear model gets scaled features: hashed names would dominate the others."""
    gbdt = {
        "n_estimators": TREES,
        "max_depth": MAX_DEPTH,
        "min_samples_split": MIN_SAMPLES_SPLIT,
        "min_samples_leaf": MIN_SAMPLES_LEAF,
    }
    return {
        "random_forest": lambda x, y: train_forest(x, y, seed=0).predict,
        "linear": lambda x, y: make_pipeline(StandardScaler(), LinearRegression()).fit(x, y).predict,
        "adaboost": lambda x, y: AdaBoostRegressor(random_state=0).fit(x, y).predict,
        "gbdt": lambda x, y: GradientBoostingRegressor(**gbdt, random_state=0).fit(x, y).predict,
        "decision_tree": lambda x, y: (
            DecisionTreeRegressor(max_depth=MAX_DEPTH, random_state=0).fit(x, y).predict
        ),
    }


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
