"""What a report shows of a run is what the record of the run says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.policies.registry import make_policy
from shoal.sim.costs import Costs
from shoal.sim.engine import Simulation
from shoal.sim.report import run_series as module
from shoal.sim.report.job_progress import early_jobs, progress_of, shares_of
from shoal.sim.report.page import assemble, choose_watched
from shoal.sim.report.run_series import series_of
from shoal.sim.report.time_buckets import Buckets
from shoal.sim.report.timelines import extremes, timelines, work_gpu_s
from shoal.sim.runner import run

from .conftest import SETUP, summary_of


def test_the_cdf_of_a_small_run_has_every_job(results, series):
    record = results["afs-p / none"].record
    jct = np.sort(record.finish_s - np.array([j.submit_s for j in record.jobs]))
    cdf = series[1]["cdf"]
    np.testing.assert_allclose(cdf["jct_s"], jct, atol=0.006)
    np.testing.assert_allclose(cdf["part"], np.arange(1, 301) / 300, atol=1e-5)


def test_a_thinned_cdf_keeps_its_ends_and_lies_on_the_full_one(results, monkeypatch):
    record = results["afs-p / none"].record
    full = module.cdf(record)
    monkeypatch.setattr(module, "MAX_CDF_POINTS", 37)
    thin = module.cdf(record)
    assert len(thin["part"]) == 37
    assert (thin["jct_s"][0], thin["jct_s"][-1]) == (full["jct_s"][0], full["jct_s"][-1])
    assert set(zip(thin["jct_s"], thin["part"])) <= set(zip(full["jct_s"], full["part"]))


def test_gpu_time_over_time_is_the_gpu_time_of_the_jobs(results, series):
    for (label, result), one in zip(results.items(), series):
        over = one["over_time"]
        used = {k: np.array(v) for k, v in over["used"].items()}
        buckets = Buckets(over["width_s"], over["end_s"], **used)
        total = (buckets.mean * buckets.covered_s).sum()
        assert total == pytest.approx(result.record.gpu_s.sum(), rel=2e-3), label
        assert buckets.high.max() == max(result.record.used) <= 64
        assert len(buckets.mean) <= 512


def test_waiting_time_over_time_is_the_waiting_time_of_the_jobs(results, series):
    over, record = series[0]["over_time"], results["fifo / none"].record
    waiting = {k: np.array(v) for k, v in over["waiting"].items()}
    buckets = Buckets(over["width_s"], over["end_s"], **waiting)
    total = (buckets.mean * buckets.covered_s).sum()
    assert total == pytest.approx(record.wait_s.sum(), rel=0.01)
    assert total > 0


def test_share_changes_over_time_add_up_without_the_ends_of_jobs(results, series):
    for result, one in zip(results.values(), series):
        assert sum(one["over_time"]["changes"]) == result.record.changes.sum()


def test_a_jobs_timeline_holds_its_gpu_time(results, series):
    record, jobs = results["afs-p / none"].record, series[1]["jobs"]
    begin = np.cumsum([0, *jobs["points"]])
    for j in range(300):
        mine = slice(begin[j], begin[j + 1])
        times, gpus = np.cumsum(jobs["at"][mine]) * jobs["unit_s"], jobs["gpus"][mine]
        assert (np.diff(times) * gpus[:-1]).sum() == pytest.approx(record.gpu_s[j], abs=6.4 * len(times))
        assert gpus[-1] == 0  # it ended
        assert times[-1] == pytest.approx(jobs["jct_s"][j], abs=0.06)


def test_guests_are_in_the_timelines_and_neither_hold_a_gpu_nor_change_a_share(shared):
    record = shared.record
    one = series_of(shared, summary_of(shared))
    jobs, over = one["jobs"], one["over_time"]
    assert len(jobs["guests"]) == record.extra["sharing"]["guests"] > 10
    assert set(jobs["gpus"][jobs["guests"]]) == {1}
    owner = np.repeat(np.arange(300), jobs["points"])
    stayed_s = jobs["at"][jobs["guests"] + 1] * jobs["unit_s"]  # to the next change of the same job
    assert stayed_s.sum() == pytest.approx(record.extra["sharing"]["guest_s"], abs=0.11 * len(stayed_s))
    assert set(owner[jobs["guests"]]) == {record.change_job[i] for i in record.colocation_changes}
    assert sum(over["changes"]) == record.changes.sum()
    assert max(over["used"]["high"]) == max(record.used) == 16
    used = {k: np.array(v) for k, v in over["used"].items()}
    buckets = Buckets(over["width_s"], over["end_s"], **used)
    assert (buckets.mean * buckets.covered_s).sum() == pytest.approx(record.gpu_s.sum(), rel=2e-3)


def test_times_of_ages_are_told_less_exactly(results):
    """Four bytes of tenths of a second are fourteen years."""
    record = results["fifo / none"].record
    late = replace(record, change_s=[1e10, 1e10, 1e10 + 40], change_job=[1, 2, 2], change_gpus=[1, 4, 0])
    found = timelines(late)
    assert found["unit_s"] == pytest.approx(10)
    assert found["points"][:4].tolist() == [0, 1, 2, 0]
    submit_s = [job.submit_s for job in record.jobs]
    np.testing.assert_allclose(
        found["at"] * found["unit_s"], [1e10 - submit_s[1], 1e10 - submit_s[2], 40], atol=5.1
    )
    assert found["at"].max() < 2**32


def test_a_run_without_changes_has_empty_timelines(results):
    nothing = replace(results["fifo / none"].record, change_s=[], change_job=[], change_gpus=[])
    found = timelines(nothing)
    assert found["points"].tolist() == [0] * 300
    assert len(found["at"]) == len(found["gpus"]) == 0


def test_thinning_keeps_the_first_last_least_and_greatest():
    rng = np.random.default_rng(1)
    at, value = np.sort(rng.uniform(0, 1e5, 5000)), rng.integers(1, 65, 5000)
    keep = extremes(at, value, 240)
    assert len(keep) <= 242
    assert (keep[0], keep[-1]) == (0, 4999)
    assert {value.min(), value.max()} <= set(value[keep])
    assert np.all(np.diff(keep) > 0)
    for part in np.array_split(np.arange(5000), 5):  # every fifth of the time is still there
        assert np.isin(keep, part).sum() > 20


class _Watched(Simulation):
    """Notes how many iterations one job has left whenever the engine looks at it."""

    def _settle(self, j, now):
        super()._settle(j, now)
        if j == self.watched:
            self.seen.append((now, self._left[j]))


CASES = [
    Costs("none"),
    Costs("restart", restart_s=120.0),
    Costs("restart", restart_s=900.0),  # longer than most shares last: overtaken again and again
    Costs("concurrent"),
    Costs("concurrent", prepare_s=20.0, pause_s=5.0),
]


@pytest.mark.parametrize("costs", CASES, ids=lambda c: f"{c.kind}-{c.restart_s:.0f}-{c.prepare_s:.0f}")
def test_progress_is_what_the_engine_reckons(results, costs):
    inputs = results["afs-p / none"].inputs
    simulation = _Watched(
        inputs.jobs, inputs.profiles, inputs.cluster, make_policy("afs-p", {}, 0), costs=costs
    )
    # The one that is resized most, so that there is something to see under every cost.
    watched = simulation.watched = int(np.argmax(results["afs-p / none"].record.changes))
    simulation.seen = []
    record, job = simulation.run(), inputs.jobs[watched]
    shares, gpu_type = shares_of(record, [watched])[0], inputs.cluster.gpu_types[0]
    curve = progress_of(record, watched, shares, inputs.profiles[job.model], gpu_type, costs)
    assert len(simulation.seen) > 5
    # While newcomers prepare, a share between the old and the new one leaves room for different readings.
    within = 5e-3 if costs.kind == "concurrent" else 1e-6
    for now, left in simulation.seen:
        done = np.interp(now - job.submit_s, curve.time_s, curve.done)
        assert done == pytest.approx(1 - left / job.iterations, abs=within)
    assert np.all(np.diff(curve.time_s) >= 0)
    assert np.all(np.diff(curve.done) >= 0)


def test_the_cost_of_a_restart_is_found_in_the_record(results):
    record = results["afs-p / restart"].record
    costs = module.costs_of(shares_of(record, [0])[0], record.paused_s[0], "restart")
    assert costs.restart_s == pytest.approx(120.0)


def test_early_jobs_depend_on_the_trace_alone_and_are_the_largest_of_its_first_tenth(results):
    result = results["afs-p / none"]
    record, work = result.record, work_gpu_s(result.record, result.inputs.profiles, "gpu")
    submit = np.array([job.submit_s for job in record.jobs])
    tenth = np.flatnonzero(submit - submit[0] <= (submit[-1] - submit[0]) / 10).tolist()
    assert early_jobs(record, work) == tenth == early_jobs(results["fifo / none"].record, work)
    few = early_jobs(record, work, 6)
    assert few[0] == 0  # at time zero
    assert set(few[1:]) == set(sorted(tenth[1:], key=lambda j: -work[j])[:5])
    at_once = [replace(job, submit_s=0.0) for job in record.jobs]
    largest = np.argsort(-work, kind="stable")[:40]
    assert early_jobs(replace(record, jobs=tuple(at_once)), work) == sorted(largest.tolist())
    assert early_jobs(replace(record, jobs=()), work[:0]) == []


def test_the_watched_job_is_of_time_zero_unless_another_changes_far_more_often():
    def run_with(*changes):
        return [{"submit_s": 60.0 * (k // 2), "changes": n} for k, n in enumerate(changes)]

    assert choose_watched([run_with(1, 5, 9, 10)]) == [1]
    assert choose_watched([run_with(1, 5, 9, 11)]) == [3, 1]
    assert choose_watched([run_with(1, 5, 11, 11)]) == [2, 1]  # of equals the earlier one
    assert choose_watched([run_with(1, 5, 30, 10), run_with(1, 5, 2, 40)]) == [3, 1]  # over all runs
    assert choose_watched([[]]) == []


def test_all_runs_of_a_policy_watch_the_same_job_and_it_is_resized_often(results, series):
    runs = [run for run in assemble(series)["runs"] if run["policy"] == "afs-p"]
    assert len({run["watched"][0]["job"] for run in runs}) == 1
    record = results["afs-p / none"].record
    early = early_jobs(record, np.ones(len(record.jobs)))
    assert runs[0]["watched"][0]["changes"] == record.changes[early].max() > 20
    assert runs[0]["watched"][1]["submit_s"] == 0
    free, restart, concurrent = (run["watched"][0]["jct_s"] for run in runs)
    assert free <= concurrent < restart


def test_the_ledger_over_time_adds_up_to_its_totals(mixed):
    one = series_of(mixed, summary_of(mixed))
    users, ledger = one["users"], mixed.summary["ledger"]
    assert sorted(users["names"]) == sorted(ledger)
    widths = np.diff([0.0, *users["time_s"]])
    covered = users["time_s"][-1]
    for name, gpus in zip(users["names"], users["gpus"]):
        for column in ("entitled", "received", "lent", "borrowed"):
            total = sum(ledger[name][t][column] for t in ("a100", "v100", "k80"))
            seen = (np.array(gpus[column]) * widths).sum()
            # The samples end at the last full interval, less than one before the run did.
            assert seen <= total + 0.01 * covered
            assert seen >= total - 0.01 * covered - 64 * (mixed.record.end_s - covered)
    assert one["figures"]["deviation"] == max(abs(u["deviation"]) for u in ledger.values())


def test_many_users_are_shown_as_the_busiest_and_the_others(mixed, monkeypatch):
    everyone = module.users(mixed.record, mixed.summary, np.ones(300))
    monkeypatch.setattr(module, "MAX_USERS", 3)
    few = module.users(mixed.record, mixed.summary, np.ones(300))
    assert few["names"] == [*everyone["names"][:2], "3 others"]
    assert len(few["totals"]) == 5
    np.testing.assert_allclose(
        np.sum([g["received"] for g in few["gpus"]], axis=0),
        np.sum([g["received"] for g in everyone["gpus"]], axis=0),
        atol=0.05,
    )


def test_trades_come_with_their_time():
    rounds = [{"time_s": 60.0 * k, "trades": [{"buyer": "ada", "price": k}] * 2} for k in range(50)]
    found = module.trades({"trades": rounds})
    assert found["count"] == 100
    assert found["items"][-1] == {"time_s": 2940.0, "buyer": "ada", "price": 49}
    assert len(found["items"]) == module.MAX_TRADES
    assert module.trades({"trades": []}) is None


def test_an_interrupted_run_has_a_series_too():
    result = run(SETUP, progress=lambda now, done, total: False)
    if not result.record.interrupted:  # the engine asks now and then only
        simulation = Simulation(
            result.inputs.jobs, result.inputs.profiles, result.inputs.cluster, make_policy("afs-p", {}, 0)
        )
        record = simulation.run(progress=lambda now, done, total: False, every=100)
        from shoal.sim.summary import summary

        figures = summary(record, result.inputs.profiles, result.inputs.cluster.gpu_types[0])
        result = replace(result, record=record, summary=figures)
    assert result.record.interrupted
    one = series_of(result, summary_of(result))
    assert 0 < len(one["cdf"]["part"]) < 300
    assert np.isnan(one["jobs"]["jct_s"]).any()
