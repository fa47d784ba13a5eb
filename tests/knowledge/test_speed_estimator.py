"""The online estimator: what it knows, where it knows it from, and how it follows the job."""

import json

import numpy as np
import pytest

from shoal.knowledge.online_speed import OnlineSpeed, Source, server_worker_table
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_models import ALL_REDUCE, ASYNC_PS, SYNC_PS
from shoal.knowledge.unknown import Unknown

THETA = np.array([0.02, 0.03, 0.02, 0.08, 0.002])


def true_seconds(gpus: int, gpus_per_node: int = 4, batch: float = 32.0) -> float:
    nodes = -(-gpus // gpus_per_node)
    return float((ALL_REDUCE.rows(np.array([[gpus, nodes, batch / gpus]], dtype=float)) @ THETA)[0])


def estimator(**options) -> SpeedEstimator:
    return SpeedEstimator(16, 4, batch_size=32.0, **options)


def teach(known: SpeedEstimator, sizes, gpu_type: str = "v100", factor: float = 1.0) -> None:
    for gpus in sizes:
        assert known.observe(gpus, -(-gpus // 4), gpu_type, factor * true_seconds(gpus)) is None


def test_a_measured_point_overrides_the_fit():
    known = estimator()
    teach(known, [1, 2, 4, 6, 8, 12])
    slower_s = 1.2 * true_seconds(8)
    for _ in range(3):
        known.observe(8, 2, "v100", slower_s)
    table = known.table("v100")
    mean = (true_seconds(8) + 3 * slower_s) / 4
    assert table.iterations_per_s[8] == pytest.approx(1 / mean)
    assert table.source[8] == Source.MEASURED


def test_the_table_has_an_entry_for_every_share_and_none_moves_at_zero():
    known = estimator()
    teach(known, [1, 2, 4, 6, 8, 12])
    table = known.table("v100")
    assert table.iterations_per_s.shape == table.relative_std.shape == table.source.shape == (17,)
    assert table.iterations_per_s[0] == 0
    truth = [1 / true_seconds(n) for n in range(1, 17)]
    assert table.iterations_per_s[1:] == pytest.approx(truth, rel=0.08)
    assert table.source[16] == Source.FITTED


def test_few_measurements_are_assumptions_and_say_so():
    known = estimator()
    teach(known, [1])
    table = known.table("v100")
    assert table.source[1] == Source.MEASURED
    assert (table.source[2:] == Source.ASSUMED).all()
    assert table.iterations_per_s[1] < table.iterations_per_s[4] < 4 * table.iterations_per_s[1]


def test_without_assumptions_other_shares_stay_unknown():
    known = estimator(assume=False)
    teach(known, [1, 4])
    table = known.table("v100")
    assert [int(n) for n in np.flatnonzero(table.source == Source.MEASURED)] == [0, 1, 4]
    assert np.isnan(table.iterations_per_s[2])
    assert np.isinf(table.relative_std[2])
    assert isinstance(known.seconds(2, 1, "v100"), Unknown)


def test_a_type_that_was_never_measured_is_unknown():
    known = estimator()
    teach(known, [1, 2])
    answer = known.table("k80")
    assert isinstance(answer, Unknown)
    assert "nothing was measured on k80 (measured: v100)" in answer.why


def test_a_little_known_type_borrows_the_shape_of_a_well_known_one():
    known = estimator()
    teach(known, [1, 2, 4, 6, 8, 12])
    teach(known, [2], gpu_type="k80", factor=3.0)
    table, lender = known.table("k80"), known.table("v100")
    assert table.source[12] == Source.ASSUMED
    assert table.iterations_per_s[16] == pytest.approx(lender.iterations_per_s[16] / 3, rel=0.05)


def test_the_speed_of_a_spread_placement_is_slower_than_packed():
    known = estimator()
    teach(known, [1, 2, 4, 6, 8, 12])
    known.observe(2, 2, "v100", float((ALL_REDUCE.rows(np.array([[2.0, 2.0, 16.0]])) @ THETA)[0]))
    assert known.seconds(4, 2, "v100") > known.seconds(4, 1, "v100")


def test_old_measurements_fade_when_the_job_changes():
    known = estimator(memory=10)
    for _ in range(200):
        known.observe(4, 1, "v100", 1.0)
    for _ in range(50):
        known.observe(4, 1, "v100", 2.0)
    assert known.table("v100").iterations_per_s[4] == pytest.approx(0.5, rel=0.01)


def test_learning_from_noisy_steps_gets_better_with_every_size_tried():
    """Mean error of the whole table, over seeds, after one, three and six sizes with 10 % noise."""
    errors = {1: [], 3: [], 6: []}
    truth = np.array([1 / true_seconds(n) for n in range(1, 17)])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        known = estimator()
        for tried, gpus in enumerate([2, 8, 16, 4, 1, 12], start=1):
            for _ in range(10):
                known.observe(gpus, -(-gpus // 4), "v100", true_seconds(gpus) * np.exp(rng.normal(0, 0.1)))
            if tried in errors:
                errors[tried].append(np.mean(abs(known.table("v100").iterations_per_s[1:] / truth - 1)))
    one, three, six = (np.mean(errors[n]) for n in (1, 3, 6))
    assert six < three < one
    assert six < 0.05


def test_the_batch_limit_keeps_the_work_per_gpu_until_the_limit():
    fixed, growing = (
        SpeedEstimator(8, 8, batch_size=8.0),
        SpeedEstimator(8, 8, batch_size=8.0, max_batch_size=32.0),
    )
    assert [fixed._local_batch(n) for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert [growing._local_batch(n) for n in (1, 2, 4, 8)] == [8, 8, 8, 4]


@pytest.mark.parametrize(
    ("gpus", "nodes", "seconds"),
    [
        (0, 1, 1.0),
        (2, 3, 1.0),
        (1, 0, 1.0),
        (1, 1, 0.0),
        (1, 1, -1.0),
        (1, 1, float("nan")),
        (1, 1, float("inf")),
    ],
)
def test_an_impossible_measurement_is_left_out_with_a_reason(gpus, nodes, seconds):
    known = estimator()
    assert isinstance(known.observe(gpus, nodes, "v100", seconds), Unknown)
    assert isinstance(known.table("v100"), Unknown)


def test_the_state_survives_saving_as_json():
    known = estimator(memory=7)
    teach(known, [1, 2, 4, 6, 8, 12])
    teach(known, [1], gpu_type="k80", factor=2.0)
    again = SpeedEstimator.from_dict(json.loads(json.dumps(known.to_dict())))
    for gpu_type in ("v100", "k80"):
        assert (
            again.table(gpu_type).iterations_per_s.tolist() == known.table(gpu_type).iterations_per_s.tolist()
        )
    assert again.to_dict() == known.to_dict()


def test_the_next_share_to_measure_is_far_from_what_is_known():
    known = estimator()
    teach(known, [1, 2])
    assert known.next_gpus("v100", [1, 2, 3, 16]) == 16
    assert isinstance(known.next_gpus("v100", []), Unknown)
    assert isinstance(known.next_gpus("k80", [1]), Unknown)


def test_a_table_is_read_only_and_kept_until_something_is_measured():
    known = estimator()
    teach(known, [1, 2])
    table = known.table("v100")
    assert known.table("v100") is table
    with pytest.raises(ValueError, match="read-only"):
        table.iterations_per_s[1] = 7.0
    teach(known, [4])
    assert known.table("v100") is not table


@pytest.mark.parametrize(
    ("model", "theta"),
    [(SYNC_PS, (0.004, 0.4, 0.4, 0.01, 0.002)), (ASYNC_PS, (2.8335, 3.9188, 0.02, 0.505))],
)
def test_servers_and_workers_are_learned_online_too(model, theta):
    """Ten of 64 configurations measured with noise; the rest of the table is predicted, the ten override."""
    rng = np.random.default_rng(4)
    known = OnlineSpeed(model)
    true = {
        (p, w): 1 / float((model.rows(np.array([[p, w, 32.0]], dtype=float)) @ np.array(theta))[0])
        for p in range(1, 9)
        for w in range(1, 9)
    }
    pairs = list(true)
    chosen = [pairs[i] for i in rng.choice(len(pairs), 10, replace=False)]
    for pair in chosen:
        for _ in range(5):
            known.observe((*map(float, pair), 32.0), float(np.exp(rng.normal(0, 0.05))) / true[pair])
    table = server_worker_table(known, 8, 8, 32.0)
    assert table.shape == (9, 9)
    assert (table[0] == 0).all()
    errors = [abs(table[pair] / speed - 1) for pair, speed in true.items()]
    assert np.mean(errors) < 0.08
    again = OnlineSpeed.from_dict(json.loads(json.dumps(known.to_dict())))
    assert server_worker_table(again, 8, 8, 32.0).tolist() == table.tolist()


def test_servers_and_workers_below_the_needed_points_are_assumed_or_unknown():
    config = np.array([[1.0, 1.0, 32.0], [2.0, 4.0, 32.0]])
    for assume, source in ((True, Source.ASSUMED), (False, Source.UNKNOWN)):
        known = OnlineSpeed(SYNC_PS, assume=assume)
        known.observe((1.0, 1.0, 32.0), 2.0)
        assert known.predict(config).source.tolist() == [Source.MEASURED, source]
    assert "there is no configuration of 0 servers" in known.observe((0.0, 1.0, 32.0), 1.0).why
