"""Speed models and their fit: known coefficients come back, and measured runs are met as the table says."""

import ast
import csv

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from shoal.knowledge.speed_fit import SpeedFit, fit_speed
from shoal.knowledge.speed_models import ALL_REDUCE, ASYNC_PS, MODELS, SYNC_PS
from shoal.knowledge.unknown import Unknown

# rows, θ of a fit to all rows, mean relative error of that, and with 10 random rows (in percent)
TABLE = {
    "cnn-text-classification": (78, (0.0075, 0.3445, 0.0237, 0.0169, 0), 3.1, 4.6),
    "dssm": (78, (0.0016, 0.1177, 0, 0.0073, 0.0002), 4.9, 6.5),
    "inception-bn": (56, (0.0031, 0.1541, 0.1664, 0.0194, 0.0028), 4.8, 6.7),
    "resnet-50": (210, (0.0039, 0.4178, 0.4213, 0.0074, 0), 9.6, 12.1),
    "resnext-110": (57, (0.0005, 0.1561, 0.1104, 0.0199, 0.0012), 6.8, 8.4),
    "seq2seq": (57, (0.0010, 0.0541, 0.0242, 0.0131, 0), 9.7, 13.1),
    "vgg-16": (202, (0.0170, 0.5812, 0.8072, 0.1356, 0), 11.3, 14.1),
    "wlm": (57, (0.0006, 0.2394, 0.1586, 0.0308, 0), 9.1, 11.8),
}
# Optimus' own coefficients, as its authors' later simulator lists them
ASYNC_RESNET_50 = (2.8335, 3.9188, 0, 0.505)
SYNC_RESNET_50 = (0.01, 1.0203, 2.7765, 4.9247, 0.0016)


def grid(columns: tuple[range, range], batch: float) -> np.ndarray:
    return np.array([(a, b, batch) for a in columns[0] for b in columns[1]], dtype=float)


@pytest.mark.parametrize(
    ("model", "theta", "configs"),
    [
        (SYNC_PS, SYNC_RESNET_50, grid((range(1, 7), range(1, 7)), 128)),
        (ASYNC_PS, ASYNC_RESNET_50, grid((range(1, 7), range(1, 7)), 128)),
        (
            ALL_REDUCE,
            (0.01, 0.05, 0.03, 0.2, 0.002),
            np.array([(n, max(n // 4, 1), b / n) for n in range(1, 33) for b in (64, 256)], dtype=float),
        ),
    ],
)
def test_exact_measurements_give_the_coefficients_back(model, theta, configs):
    seconds = model.rows(configs) @ np.array(theta)
    fit = fit_speed(model, configs, seconds, ridge=0.0)
    assert isinstance(fit, SpeedFit)
    assert fit.theta == pytest.approx(theta, abs=1e-6)
    assert fit.steps_per_s(configs) == pytest.approx(1 / seconds)


def test_a_fixed_global_batch_leaves_coefficients_open_but_not_the_speed():
    """With b = M/n the terms b, 1 and (n-1)/n depend on each other: many θ, one curve."""
    sizes = np.arange(1, 33, dtype=float)
    configs = np.stack([sizes, np.ceil(sizes / 4), 256 / sizes], axis=1)
    seconds = ALL_REDUCE.rows(configs) @ np.array([0.01, 0.05, 0.03, 0.2, 0.002])
    fit = fit_speed(ALL_REDUCE, configs, seconds, ridge=0.0)
    assert fit.seconds(configs) == pytest.approx(seconds, rel=1e-4)


def test_the_papers_equations_are_the_rows():
    p, w, m = 3.0, 5.0, 64.0
    sync = (0.3 * m / w + 0.5 + 0.7 * w / p + 0.11 * w + 0.13 * p) ** -1
    asynchronous = w * (0.3 + 0.5 * w / p + 0.7 * w + 0.11 * p) ** -1
    config = np.array([[p, w, m]])
    assert 1 / (SYNC_PS.rows(config) @ [0.3, 0.5, 0.7, 0.11, 0.13])[0] == pytest.approx(sync)
    assert 1 / (ASYNC_PS.rows(config) @ [0.3, 0.5, 0.7, 0.11])[0] == pytest.approx(asynchronous)


def test_one_gpu_has_no_communication_in_the_all_reduce_model():
    assert ALL_REDUCE.rows(np.array([[1.0, 1.0, 32.0]])).tolist() == [[32.0, 1.0, 0.0, 0.0, 0.0]]
    assert ALL_REDUCE.rows(np.array([[4.0, 1.0, 8.0]]))[0, 3] == 0.0, "inside a node nothing crosses"
    assert ALL_REDUCE.rows(np.array([[4.0, 2.0, 8.0]]))[0, 3] == pytest.approx(0.75)


def measured_speeds(shared_data) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rows: dict[str, list] = {}
    for line in (shared_data / "dl2" / "config_speed.txt").read_text().splitlines():
        model, _, batch, servers, workers, speeds, *_ = ast.literal_eval(line)
        if sum(speeds) > 0:
            rows.setdefault(model, []).append((servers, workers, batch, sum(speeds) / batch))
    arrays = {model: np.array(found, dtype=float) for model, found in rows.items()}
    return {model: (found[:, :3], 1 / found[:, 3]) for model, found in arrays.items()}


@pytest.mark.reference
@pytest.mark.parametrize("model", TABLE)
def test_measured_parameter_server_runs_have_the_coefficients_of_the_reference(shared_data, model):
    count, theta, error, _ = TABLE[model]
    configs, seconds = measured_speeds(shared_data)[model]
    assert len(seconds) == count
    fit = fit_speed(SYNC_PS, configs, seconds, ridge=0.0)
    assert fit.theta == pytest.approx(theta, abs=6e-5), "the table gives four decimals"
    assert 100 * np.mean(abs(seconds / fit.seconds(configs) - 1)) == pytest.approx(error, abs=0.06)


@pytest.mark.reference
@pytest.mark.parametrize("model", TABLE)
def test_ten_random_points_predict_no_worse_than_the_reference(shared_data, model):
    configs, seconds = measured_speeds(shared_data)[model]
    rng = np.random.default_rng(9973)
    errors = []
    for _ in range(200):
        chosen = rng.choice(len(seconds), 10, replace=False)
        predicted = fit_speed(SYNC_PS, configs[chosen], seconds[chosen], min_points=1).seconds(configs)
        predicted[chosen] = seconds[chosen]  # a measured point overrides the fit
        errors.append(np.mean(abs(seconds / predicted - 1)))
    assert 100 * np.mean(errors) <= TABLE[model][3]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("model", "limit"),
    [("bert", 12), ("cifar10", 16), ("deepspeech2", 13), ("imagenet", 13), ("ncf", 16), ("yolov3", 14)],
)
def test_ten_points_predict_all_other_placements_and_sizes(shared_data, model, limit):
    rows = []
    for row in csv.DictReader((shared_data / "pollux" / model / "placements.csv").open()):
        per_node = [int(digit) for digit in row["placement"]]
        rows.append((sum(per_node), len(per_node), float(row["local_bsz"]), float(row["step_time"])))
    for row in csv.DictReader((shared_data / "pollux" / model / "scalability.csv").open()):
        size = (float(row["num_replicas"]), float(row["num_nodes"]))
        rows.append((*size, float(row["local_bsz"]), float(row["step_time"])))
    table = np.array(rows)
    rng = np.random.default_rng(5)
    errors = []
    for _ in range(50):
        chosen = rng.choice(len(table), 10, replace=False)
        held_out = np.delete(table, chosen, axis=0)
        fit = fit_speed(ALL_REDUCE, table[chosen, :3], table[chosen, 3], min_points=1)
        errors.append(np.mean(abs(held_out[:, 3] / fit.seconds(held_out[:, :3]) - 1)))
    assert 100 * np.mean(errors) < limit


def test_relative_weights_keep_slow_configurations_from_deciding_alone():
    """One configuration stalls and is a thousand times slower; the rest must stay well fitted."""
    configs = grid((range(1, 5), range(1, 5)), 32)
    seconds = SYNC_PS.rows(configs) @ np.array([0.01, 0.1, 0.05, 0.02, 0.01])
    seconds[0] *= 1000
    weighted = fit_speed(SYNC_PS, configs, seconds, ridge=0.0)
    plain, _ = nnls(SYNC_PS.rows(configs), seconds)
    rest = slice(1, None)
    error = np.median(abs(weighted.seconds(configs)[rest] / seconds[rest] - 1))
    plain_error = np.median(abs(SYNC_PS.rows(configs)[rest] @ plain / seconds[rest] - 1))
    assert error < 0.6
    assert plain_error > 5


positive = st.floats(1e-3, 1e3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 16), positive), min_size=1, max_size=12), st.data()
)
def test_a_fit_never_predicts_a_step_of_no_length(points, data):
    model = data.draw(st.sampled_from(sorted(MODELS)))
    configs = np.array([(max(a, b), b, 64 / a) for a, b, _ in points], dtype=float)
    fit = fit_speed(MODELS[model], configs, np.array([s for *_, s in points]), min_points=1)
    everywhere = np.array([(a, min(a, b), 64 / a) for a in (1, 2, 8, 64) for b in (1, 8)], dtype=float)
    predicted = fit.seconds(everywhere)
    assert np.isfinite(predicted).all()
    assert (predicted > 0).all()
    assert np.isfinite(fit.relative_std(everywhere)).all()


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_predictions_scale_with_the_unit_of_time(factor, seed):
    rng = np.random.default_rng(seed)
    configs = np.array([(n, 1 + n // 5, 32 / n) for n in (1, 2, 3, 5, 8, 13)], dtype=float)
    seconds = rng.uniform(0.1, 1.0, len(configs))
    one = fit_speed(ALL_REDUCE, configs, seconds).seconds(configs)
    other = fit_speed(ALL_REDUCE, configs, seconds * factor).seconds(configs)
    assert other == pytest.approx(one * factor, rel=1e-6)


def test_measuring_more_makes_the_prediction_surer():
    rng = np.random.default_rng(0)
    sizes = np.array([1, 2, 4, 8, 16, 3, 6, 12, 10, 5, 7, 9, 14])
    configs = np.stack([sizes, -(-sizes // 4), 256 / sizes], axis=1)
    seconds = ALL_REDUCE.rows(configs) @ np.array([0.01, 0.05, 0.03, 0.2, 0.002])
    seconds *= np.exp(rng.normal(0, 0.05, len(seconds)))
    target = np.array([[20.0, 5.0, 12.8]])
    few, many = (fit_speed(ALL_REDUCE, configs[:n], seconds[:n]).relative_std(target)[0] for n in (5, 13))
    assert many < few


@pytest.mark.parametrize(
    ("configs", "seconds", "why"),
    [
        (np.empty((0, 3)), [], "0 distinct configurations"),
        ([[1, 1, 8]] * 6, [1, 1, 1, 1, 1, 1], "1 distinct configurations are measured and 5 are needed"),
        ([[n, 1, 8 / n] for n in range(1, 7)], [1, np.nan, np.inf, -1, 0, 1], "4 unusable measurements"),
        ([[1, 1, 8], [2, 1, 4]], [1.0], "2 configurations but 1 times"),
    ],
)
def test_too_little_to_fit_is_unknown_and_says_why(configs, seconds, why):
    answer = fit_speed(ALL_REDUCE, np.asarray(configs, dtype=float), np.asarray(seconds, dtype=float))
    assert isinstance(answer, Unknown)
    assert why in answer.why
    assert str(answer).startswith("unknown, because ")
