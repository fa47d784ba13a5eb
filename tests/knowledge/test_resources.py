"""Features, forests and estimates: exact against scikit-learn, safe to load, and honest about the unknown."""

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.knowledge.features import as_number, flags_of, fnv1a_32, task_features
from shoal.knowledge.forest import Forest, forest_from_dict, join_trees, train_forest
from shoal.knowledge.marginal_utility import right_share
from shoal.knowledge.resources import (
    DEFAULT_NEEDS,
    Example,
    ResourceEstimator,
    round_needs,
)
from shoal.knowledge.synthetic_jobs import WORKLOADS, draw_example, true_use
from shoal.knowledge.unknown import Unknown


@pytest.mark.parametrize(("text", "value"), [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)])
def test_text_is_hashed_by_fnv1a(text, value):
    assert fnv1a_32(text) == value


def test_flags_become_features_and_places_are_left_out():
    command = "python train.py --model=vgg16 --batch_size=32 --lr 0.1 --fp16 --job_name=worker --n -3"
    features = task_features(command.split(), num_gpus=2, servers=1, workers=2, is_server=True)
    assert features == {
        "num_gpus": 2,
        "ps_number": 1,
        "worker_number": 2,
        "role": 1,
        "model": "vgg16",
        "batch_size": 32,
        "lr": "0.1",
        "fp16": 1,
        "n": -3,
    }
    assert as_number(features["lr"]) == fnv1a_32("0.1")
    assert flags_of(["--", "-x", "--=3"]) == {}


@pytest.mark.parametrize("seed", range(4))
def test_the_arrays_predict_bit_for_bit_what_scikit_learn_predicts(seed):
    from sklearn.ensemble import RandomForestRegressor

    rng = np.random.default_rng(seed)
    samples = np.column_stack(
        [
            rng.integers(0, 5, 300),
            rng.normal(0, 1, 300),
            rng.integers(0, 2**32, 300),
            rng.uniform(0, 1e-3, 300),
        ]
    ).astype(float)
    target = samples[:, 0] ** 2 + samples[:, 1] + rng.normal(0, 0.3, 300)
    model = RandomForestRegressor(
        n_estimators=70,
        max_depth=13,
        min_samples_split=10,
        min_samples_leaf=5,
        max_features=3,
        random_state=seed,
    ).fit(samples[:200], target[:200])
    forest = join_trees([estimator.tree_ for estimator in model.estimators_], 4)
    assert forest.predict(samples).tolist() == model.predict(samples).tolist()
    ours = train_forest(samples[:200], target[:200], seed=seed, max_features=3)
    assert ours.predict(samples).tolist() == model.predict(samples).tolist()


def small_forest() -> Forest:
    rng = np.random.default_rng(0)
    samples = rng.uniform(0, 1, (40, 2))
    return train_forest(samples, samples[:, 0] * 10, seed=0)


def test_a_forest_survives_saving_as_json():
    forest = small_forest()
    again = forest_from_dict(json.loads(json.dumps(forest.to_dict())))
    samples = np.random.default_rng(1).uniform(0, 1, (50, 2))
    assert again.predict(samples).tolist() == forest.predict(samples).tolist()


def broken(**changes):
    return {**small_forest().to_dict(), **changes}


def with_first(name, value):
    state = small_forest().to_dict()
    state[name] = [value, *state[name][1:]]
    return state


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "cannot be read"),
        (broken(value="no numbers"), "cannot be read"),
        (broken(value=[1.0]), "different lengths"),
        (broken(feature=[[1]]), "not flat lists"),
        (with_first("left", 0), "does not come after its parent"),
        (with_first("right", 10**6), "does not come after its parent"),
        (with_first("feature", 7), "a feature that it does not have"),
        (with_first("roots", -1), "root"),
        (broken(roots=[]), "root"),
        (with_first("value", float("nan")), "not finite"),
    ],
)
def test_a_file_that_is_no_forest_is_refused_with_a_reason(state, why):
    answer = forest_from_dict(state)
    assert isinstance(answer, Unknown)
    assert why in answer.why


def test_only_training_imports_scikit_learn():
    code = "import sys, shoal.knowledge.resources, shoal.knowledge.synthetic_jobs; print('sklearn' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "False"


@cache  # training takes a while; tests that teach it more make their own
def taught(
    count: int = 60, job_type: str = "cnn", names: tuple[str, ...] = ("resnet50",)
) -> ResourceEstimator:
    rng = np.random.default_rng(3)
    known = ResourceEstimator(seed=1)
    for _ in range(count):
        assert known.observe(job_type, draw_example(rng, names)) is None
    assert known.train(job_type) is None
    return known


FEATURES = task_features(
    ["--model=resnet50", "--batch_size=16", "--num_batches=500"], num_gpus=1, servers=0, workers=1
)


def test_an_estimate_is_near_the_truth_and_rounded_as_liquid_rounds():
    known = taught(200)
    truth = true_use(WORKLOADS["resnet50"], FEATURES)
    predicted = known.predict("cnn", FEATURES)
    assert predicted["gpu_mem_mb"] == pytest.approx(truth["gpu_mem_mb"], rel=0.15)
    assert predicted["gpu_util"] == pytest.approx(truth["gpu_util"], rel=0.15)
    needs = known.needs("cnn", FEATURES)
    assert needs == round_needs(predicted, "200 finished jobs of type cnn")
    assert needs.gpu_mem_mb % 1024 == 0
    assert needs.gpu_mem_mb >= predicted["gpu_mem_mb"]


def test_rounding_follows_the_reference():
    predicted = {
        "cpu": 101.0,
        "mem_mb": 4097.0,
        "gpu_util": 58.2,
        "gpu_util_std": 3.5,
        "gpu_mem_mb": 2048.0,
        "bw_rx_kb_s": 100_001.0,
    }
    needs = round_needs(predicted, "test")
    assert (needs.cpus, needs.mem_mb, needs.gpu_util, needs.gpu_mem_mb, needs.bandwidth) == (
        2,
        5120,
        50,
        2048,
        2,
    )
    assert round_needs({**predicted, "gpu_util": 89.1}, "test").gpu_util == 90


def test_defaults_are_those_of_the_reference():
    needs = DEFAULT_NEEDS
    assert (needs.cpus, needs.mem_mb, needs.gpu_util, needs.gpu_mem_mb, needs.bandwidth) == (
        4,
        4096,
        100,
        8192,
        1,
    )


def test_forests_are_trained_again_after_every_third_new_job():
    known = taught.__wrapped__(12)
    rng = np.random.default_rng(5)
    due = []
    for _ in range(7):
        known.observe("cnn", draw_example(rng, ("resnet50",)))
        due.append(known.due("cnn"))
        if due[-1]:
            known.train("cnn")
    assert due == [False, False, True, False, False, True, False]


def test_a_type_without_enough_jobs_is_unknown():
    known = ResourceEstimator()
    assert "no model of job type cnn" in known.needs("cnn", FEATURES).why
    assert "0 jobs of type cnn finished; 10 are needed" in known.train("cnn").why
    assert not known.due("cnn")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"optimizer": "adam"}, "optimizer was never seen"),
        ({"model": "bert"}, "model=bert was never seen"),
    ],
)
def test_unknown_features_are_unknown_not_guessed(change, why):
    answer = taught().needs("cnn", {**FEATURES, **change})
    assert isinstance(answer, Unknown)
    assert why in answer.why


def test_a_missing_feature_that_all_earlier_jobs_gave_is_unknown():
    features = {name: value for name, value in FEATURES.items() if name != "batch_size"}
    assert "does not give batch_size" in taught().needs("cnn", features).why


def test_a_flag_that_only_some_jobs_gave_may_be_given_or_not():
    rng = np.random.default_rng(0)
    known = ResourceEstimator()
    for number in range(40):
        example = draw_example(rng, ("resnet50",))
        extra = {"fp16": 1} if number % 2 else {}
        known.observe("cnn", Example({**example.features, **extra}, example.labels))
    known.train("cnn")
    assert not isinstance(known.needs("cnn", FEATURES), Unknown)
    assert not isinstance(known.needs("cnn", {**FEATURES, "fp16": 1}), Unknown)


def test_a_value_outside_what_was_seen_is_pointed_out():
    assert taught().needs("cnn", {**FEATURES, "batch_size": 4096}).outside == ("batch_size",)
    assert taught().needs("cnn", FEATURES).outside == ()


@pytest.mark.parametrize(
    ("example", "why"),
    [
        (Example(FEATURES, {"cpu": 1.0}, exclusive=False), "shared its GPU"),
        (Example(FEATURES, {"cpu": float("nan")}), "cpu is not a number"),
        (Example(FEATURES, {"cpu": -1.0}), "cpu is not a number"),
    ],
)
def test_jobs_that_cannot_teach_are_left_out_with_a_reason(example, why):
    answer = ResourceEstimator().observe("cnn", example)
    assert isinstance(answer, Unknown)
    assert why in answer.why


def test_the_estimator_survives_saving_as_json_and_refuses_what_is_not_one():
    known = taught(30)
    again = ResourceEstimator.from_dict(json.loads(json.dumps(known.to_dict())))
    assert again.needs("cnn", FEATURES) == known.needs("cnn", FEATURES)
    assert "cannot be read" in ResourceEstimator.from_dict({"types": 3}).why
    state = known.to_dict()
    state["types"]["cnn"]["columns"] = ["one"]
    assert "features, not 1" in ResourceEstimator.from_dict(state).why


def test_the_number_of_gpus_comes_from_predicted_times_and_diminishing_gains():
    """Jobs that speed up well to four GPUs and hardly after: four is right, and nine was never seen."""
    known = ResourceEstimator()
    for number in range(160):
        gpus = 1 + number % 8
        total_s = 1000 / (gpus if gpus <= 4 else 4 + 0.1 * (gpus - 4))
        known.observe("cnn", Example({**FEATURES, "num_gpus": gpus}, {"total_s": total_s}))
    known.train("cnn")
    speed = known.speed_by_gpus("cnn", FEATURES, max_gpus=16)
    assert len(speed) == 9
    assert speed[0] == 0
    assert speed[4] == pytest.approx(4 * speed[1], rel=0.02)
    assert right_share(speed).gpus == 4
    assert isinstance(known.needs("cnn", FEATURES), Unknown), "times alone do not tell what to reserve"
    assert isinstance(taught(20).speed_by_gpus("other", FEATURES, 8), Unknown)


@pytest.mark.parametrize("label", ["gpu_mem_mb", "bw_rx_kb_s", "total_s"])
def test_the_forest_beats_a_linear_model_with_400_jobs_and_improves_with_more(label):
    """As in the paper's figure: RMSE and R2 of 50 test jobs; R2 = 1 - MSE / variance."""
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scores: dict[str, list[float]] = {"forest 100": [], "forest 400": [], "linear 400": []}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        examples = [draw_example(rng) for _ in range(450)]
        columns = sorted(examples[0].features)
        samples = np.array([[as_number(e.features[c]) for c in columns] for e in examples])
        target = np.array([e.labels[label] for e in examples])
        linear = make_pipeline(StandardScaler(), LinearRegression()).fit(samples[:400], target[:400])

        def r2(predicted, test=target[400:]):
            return 1 - np.mean((predicted - test) ** 2) / np.var(test)

        scores["linear 400"].append(r2(linear.predict(samples[400:])))
        for size in (100, 400):
            forest = train_forest(samples[:size], target[:size], seed=0)
            scores[f"forest {size}"].append(r2(forest.predict(samples[400:])))
    means = {name: np.mean(values) for name, values in scores.items()}
    assert means["forest 400"] > means["linear 400"] + 0.1
    assert means["forest 400"] > means["forest 100"]
    assert means["forest 400"] > 0.86, "the best the paper reports, on its own data"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000))
def test_generated_jobs_are_in_the_published_ranges(seed):
    example = draw_example(np.random.default_rng(seed), tuple(WORKLOADS))
    features, labels = example.features, example.labels
    work = WORKLOADS[str(features["model"])]
    for flag, (low, high, step) in (("batch_size", work.batch), ("num_batches", work.batches)):
        assert low <= features[flag] <= high
        assert (features[flag] - low) % step == 0
    assert features["num_gpus"] <= work.max_gpus
    if features["worker_number"] == 2:
        assert (features["ps_number"], features["num_gpus"]) == (1, 1)
    assert all(value >= 0 and np.isfinite(value) for value in labels.values())
    assert labels["gpu_util"] <= 100
