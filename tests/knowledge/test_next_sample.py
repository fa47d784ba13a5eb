"""Which point to measure next: against a plain recomputation, and against chance on measured runs."""

import ast

import numpy as np
import pytest

from shoal.knowledge.next_sample import next_sample, variance_gains
from shoal.knowledge.speed_fit import fit_speed
from shoal.knowledge.speed_models import ALL_REDUCE, SYNC_PS
from shoal.knowledge.unknown import Unknown


def some_fit(seed: int):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 20, 7).astype(float)
    configs = np.stack([sizes, np.ceil(sizes / 4), 64 / sizes], axis=1)
    seconds = (
        ALL_REDUCE.rows(configs) @ np.array([0.01, 0.05, 0.03, 0.2, 0.002]) * np.exp(rng.normal(0, 0.1, 7))
    )
    return fit_speed(ALL_REDUCE, configs, seconds, min_points=1)


def every_share(up_to: int = 24) -> np.ndarray:
    sizes = np.arange(1, up_to + 1, dtype=float)
    return np.stack([sizes, np.ceil(sizes / 4), 64 / sizes], axis=1)


@pytest.mark.parametrize("seed", range(8))
def test_gains_equal_inverting_the_enlarged_information_for_each_candidate(seed):
    fit, table = some_fit(seed), every_share()
    relative = ALL_REDUCE.rows(table) / fit.seconds(table)[:, None]

    def summed_variance(information: np.ndarray) -> float:
        return float(np.trace(relative @ np.linalg.inv(information) @ relative.T))

    now = summed_variance(fit.information)
    naive = [now - summed_variance(fit.information + np.outer(row, row)) for row in relative]
    gains, total = variance_gains(fit, table, table)
    assert total == pytest.approx(now)
    assert gains == pytest.approx(naive, rel=1e-6)
    assert next_sample(fit, table, table).index == int(np.argmax(naive))


def test_a_dear_trial_must_be_worth_its_cost():
    fit, table = some_fit(1), every_share()
    free = next_sample(fit, table, table)
    cost = np.ones(len(table))
    cost[free.index] = 1e9
    assert next_sample(fit, table, table, cost).index != free.index


def test_nothing_to_choose_from_is_unknown():
    fit = some_fit(0)
    assert isinstance(next_sample(fit, np.empty((0, 3)), every_share()), Unknown)
    assert isinstance(next_sample(fit, every_share(), every_share(), np.zeros(24)), Unknown)


@pytest.mark.reference
def test_chosen_points_teach_more_than_random_ones_on_measured_runs(shared_data):
    """Eight models, ten points each: held-out error with points chosen one by one against points drawn."""
    rows: dict[str, list] = {}
    for line in (shared_data / "dl2" / "config_speed.txt").read_text().splitlines():
        model, _, batch, servers, workers, speeds, *_ = ast.literal_eval(line)
        if sum(speeds) > 0:
            rows.setdefault(model, []).append((servers, workers, batch, batch / sum(speeds)))
    rng = np.random.default_rng(3)
    by_choice, by_chance = [], []
    for found in rows.values():
        table = np.array(found, dtype=float)
        configs, seconds = table[:, :3], table[:, 3]

        def held_out(chosen, configs=configs, seconds=seconds):
            fit = fit_speed(SYNC_PS, configs[chosen], seconds[chosen], min_points=1)
            return np.mean(np.delete(abs(seconds / fit.seconds(configs) - 1), chosen))

        for _ in range(5):
            drawn = rng.choice(len(seconds), 10, replace=False)
            by_chance.append(held_out(drawn))
            chosen = list(drawn[:2])
            while len(chosen) < 10:
                fit = fit_speed(SYNC_PS, configs[chosen], seconds[chosen], min_points=1, reference=configs)
                left = np.setdiff1d(np.arange(len(seconds)), chosen)
                chosen.append(int(left[next_sample(fit, configs[left], configs).index]))
            by_choice.append(held_out(chosen))
    assert np.mean(by_choice) < 0.9 * np.mean(by_chance)
