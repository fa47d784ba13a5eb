"""The experiment of the Optimus paper (EuroSys'18): Optimus, DRF and Tetris, in slots of ten minutes.

Jobs train one of eight models with parameter servers. Their true speed is the published model of synchronous
training with coefficients fitted to the measurements of the same author (θ below), times the slowdown by
placement in the step-time model of `placement.ps_speed`. Optimus knows speeds and remaining work with errors.
DRF and Tetris allocate bundles of one server and one worker and spread them by load. A job whose numbers of
servers and workers change loses `restart_s`.

The job lengths of the paper are not published. Here the number of epochs is drawn so that a job takes about one
to two hours with four servers and four workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.placement.ps_speed import TRAFFIC, step_time_s
from shoal.placement.task_placement import TaskPlacement, place
from shoal.policies.optimus import drf, parameter_servers, tetris

FloatArray = NDArray[np.float64]

#: θ0..θ4 of 1 / (θ0 M/w + θ1 + θ2 w/p + θ3 w + θ4 p), and the batch M, fitted to measured speeds.
MODELS: dict[str, tuple[tuple[float, ...], int]] = {
    "cnn-text": ((0.0075, 0.3445, 0.0237, 0.0169, 0.0), 50),
    "dssm": ((0.0016, 0.1177, 0.0, 0.0073, 0.0002), 256),
    "inception-bn": ((0.0031, 0.1541, 0.1664, 0.0194, 0.0028), 128),
    "resnet-50": ((0.0039, 0.4178, 0.4213, 0.0074, 0.0), 32),
    "resnext-110": ((0.0005, 0.1561, 0.1104, 0.0199, 0.0012), 128),
    "seq2seq": ((0.0010, 0.0541, 0.0242, 0.0131, 0.0), 64),
    "vgg-16": ((0.0170, 0.5812, 0.8072, 0.1356, 0.0), 32),
    "wlm": ((0.0006, 0.2394, 0.1586, 0.0308, 0.0), 160),
}
MAX_TASKS = 16
#: CPUs, GB, GPUs of a node.
NODE = (16.0, 48.0, 2.0)
SLOT_S = 600.0

#: Optimus' gain in the paper: DRF has 2.39 times its JCT and 1.63 times its makespan ("representative schedulers":
#: 139 % and 63 %). The ratios of Tetris are not in our sources.
PAPER = {("drf", "jct"): 2.39, ("drf", "makespan"): 1.63}


@dataclass(frozen=True, slots=True)
class Setting:
    """One experiment."""

    name: str
    jobs: int
    nodes: int
    arrive_s: float
    restart_s: float = 20.0
    #: Relative errors of Optimus' predictions: the paper claims below 20 % and below 10 %.
    length_error: float = 0.2
    speed_error: float = 0.1
    #: Whether the errors of speeds are independent at each point, instead of those of one fitted curve.
    pointwise: bool = False
    #: Factor on the lengths of the jobs.
    length: float = 1.0
    #: Factor on the baselines' time to exchange parameters, for unbalanced blocks over servers.
    baseline_exchange: float = 1.0


TESTBED = Setting("testbed: 9 jobs, 13 nodes", 9, 13, 12_000.0)
LONG = Setting("testbed, jobs four times as long", 9, 13, 12_000.0, length=4.0)
UNBALANCED = Setting("testbed, baselines exchange 1.5 times as long", 9, 13, 12_000.0, baseline_exchange=1.5)
POINTWISE = Setting("testbed, speeds off point by point", 9, 13, 12_000.0, pointwise=True)
RELEASED = Setting("released generator: 60 jobs, 60 nodes", 60, 60, 20 * SLOT_S)

#: Allocation and placement rule of each scheduler.
SCHEDULERS = {
    "optimus": ("optimus", "optimus"),
    "optimus, spread": ("optimus", "least-loaded"),
    "drf, packed": ("drf", "optimus"),
    "drf": ("drf", "least-loaded"),
    "tetris": ("tetris", "tetris"),
}


@dataclass(slots=True)
class _Job:
    model: str
    arrive_s: float
    steps: float
    ps_need: FloatArray
    worker_need: FloatArray
    #: [p-1, w-1]: true speed at the ideal placement, and the speed that Optimus predicts.
    speed: FloatArray
    seen: FloatArray
    length_factor: float
    done: float = 0.0
    tasks: tuple[int, int] = (0, 0)
    finish_s: float = np.inf

    @property
    def left(self) -> float:
        return self.steps - self.done


def make_jobs(setting: Setting, rng: np.random.Generator, exchange: float = 1.0) -> list[_Job]:
    """Jobs of random models, lengths and container sizes, in order of arrival.

    `exchange`: factor on the time to exchange parameters with the servers (θ2).
    """
    (errors,) = rng.spawn(1)  # a separate stream: the jobs do not depend on the prediction errors
    jobs = []
    for arrive_s in np.sort(rng.uniform(0, setting.arrive_s, setting.jobs)):
        model = str(rng.choice(sorted(MODELS)))
        theta, batch = np.array(MODELS[model][0]), MODELS[model][1]
        fitted = theta * errors.uniform(1 - setting.speed_error, 1 + setting.speed_error, len(theta))
        speed, seen = parameter_servers.sync_speed(
            np.array([theta * [1, 1, exchange, 1, 1], fitted]),
            np.array([batch, batch]),
            MAX_TASKS,
            MAX_TASKS,
        )
        if setting.pointwise:
            seen = speed * errors.uniform(1 - setting.speed_error, 1 + setting.speed_error, speed.shape)
        jobs.append(
            _Job(
                model,
                float(arrive_s),
                float(TRAFFIC[model].steps_per_epoch * rng.integers(10, 60)) * setting.length,
                np.array([rng.integers(3, 5), rng.integers(9, 11), 0.0]),
                np.array([2.0, rng.integers(8, 11), 1.0]),
                speed,
                seen,
                float(errors.uniform(1 - setting.length_error, 1 + setting.length_error)),
            )
        )
    return jobs


def simulate(setting: Setting, scheduler: str, seed: int) -> dict[str, float]:
    """Average JCT and makespan in seconds, and the fraction of time spent on restarts."""
    allocate_by, place_by = SCHEDULERS[scheduler]
    exchange = 1.0 if allocate_by == "optimus" else setting.baseline_exchange
    jobs = make_jobs(setting, np.random.default_rng(seed), exchange)
    capacity = np.tile(NODE, (setting.nodes, 1))
    now_s = run_s = restart_s = 0.0
    while any(np.isinf(j.finish_s) for j in jobs):
        active = [j for j in jobs if j.arrive_s <= now_s and np.isinf(j.finish_s)]
        if active:
            placed = _schedule(active, capacity, allocate_by, place_by)
            for i, job in enumerate(active):
                rows = placed.of(i)
                tasks = (int(placed.placed_ps[i]), int(placed.placed_workers[i]))
                is_placed = tasks != (0, 0)
                lost_s = setting.restart_s if tasks != job.tasks and is_placed else 0.0
                job.tasks = tasks
                if is_placed:
                    run_s, restart_s = run_s + SLOT_S, restart_s + lost_s
                    _run(job, rows, now_s + lost_s, SLOT_S - lost_s)
        now_s += SLOT_S
    finish = np.array([j.finish_s for j in jobs])
    return {
        "jct_s": float(np.mean(finish - [j.arrive_s for j in jobs])),
        "makespan_s": float(finish.max() - jobs[0].arrive_s),
        "restart_part": restart_s / run_s,
    }


def _run(job: _Job, rows: list[tuple[int, int, int]], start_s: float, run_s: float) -> None:
    """Train a job at its placement for the rest of a slot."""
    ps, workers = job.tasks
    traffic = TRAFFIC[job.model]
    slower = step_time_s(traffic, [(p, w) for _, p, w in rows]) / _ideal_step_s(job.model, ps, workers)
    speed = job.speed[ps - 1, workers - 1] / max(slower, 1.0)
    if job.left <= speed * run_s:
        job.finish_s = start_s + job.left / speed
        job.done = job.steps
    else:
        job.done += speed * run_s


def _ideal_step_s(model: str, ps: int, workers: int) -> float:
    """The step time in equal parts on nodes of two GPUs, for which the speeds above are assumed to hold."""
    nodes = max(-(-ps // 2), -(-workers // 2), 1)
    dealt = [(len(range(i, ps, nodes)), len(range(i, workers, nodes))) for i in range(nodes)]
    return step_time_s(TRAFFIC[model], dealt)


def _schedule(active: list[_Job], capacity: FloatArray, allocate_by: str, place_by: str) -> TaskPlacement:
    ps_needs = np.array([j.ps_need for j in active])
    worker_needs = np.array([j.worker_need for j in active])
    bundle, total = ps_needs + worker_needs, capacity.sum(axis=0)
    if allocate_by == "tetris":
        placed = tetris.place(capacity, bundle, np.array([j.left / j.steps for j in active]))
        job, node = np.nonzero(placed)
        count = placed[job, node]
        bundles = placed.sum(axis=1)
        return TaskPlacement(*(a.astype(np.int32) for a in (job, node, count, count, bundles, bundles)))
    if allocate_by == "drf":
        ps = workers = drf.allocate(bundle, total, skip_misfits=True)
    else:
        tasks = parameter_servers.allocate(
            np.array([j.left * j.length_factor for j in active]),
            np.array([j.seen for j in active]),
            ps_needs,
            worker_needs,
            total,
            young=np.array([j.done < 0.1 * j.steps for j in active]),
            skip_misfits=True,
        )
        ps, workers = tasks.ps, tasks.workers
    return _place_given(capacity, ps, workers, ps_needs, worker_needs, place_by)


def _place_given(
    capacity: FloatArray,
    ps: NDArray[np.int32],
    workers: NDArray[np.int32],
    ps_needs: FloatArray,
    worker_needs: FloatArray,
    rule: str,
) -> TaskPlacement:
    """Place the jobs with an allocation; a job that does not fit as a whole gets less, or nothing."""
    ps, workers = ps.copy(), workers.copy()
    while True:
        rows = np.flatnonzero((ps > 0) & (workers > 0))
        got = place(
            capacity, ps[rows], workers[rows], ps_needs[rows], worker_needs[rows], rule=rule, order_by=2
        )
        failed = rows[got.placed_ps == 0]
        if rule == "optimus" or not len(failed):
            placed_ps, placed_workers = np.zeros_like(ps), np.zeros_like(workers)
            placed_ps[rows], placed_workers[rows] = got.placed_ps, got.placed_workers
            job = rows[got.job].astype(np.int32)
            return TaskPlacement(job, got.node, got.ps, got.workers, placed_ps, placed_workers)
        ps[failed] -= 1
        workers[failed] -= 1


def run(seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Every scheduler on every setting, over several seeds; `quick` takes fewer."""
    seeds = range(seed, seed + (3 if quick else 6))
    settings = []
    for setting in (TESTBED,) if quick else (TESTBED, LONG, UNBALANCED, POINTWISE, RELEASED):
        by: dict[str, dict[str, float]] = {}
        for scheduler in SCHEDULERS:
            runs = [simulate(setting, scheduler, s) for s in seeds]
            by[scheduler] = {key: float(np.mean([r[key] for r in runs])) for key in runs[0]}
        settings.append({"setting": setting.name, "schedulers": by})
    return {
        "paper": "optimus",
        "seed": seed,
        "runs": len(seeds),
        "settings": settings,
        "rows": [row for one in settings for row in _rows(one)],
        "why": WHY,
    }


WHY = (
    "The direction is the paper's: Optimus is better than DRF in both metrics, mostly by its allocation, partly by "
    "its placement; restarts cost it about one per cent of the time. Makespan: on the testbed the last of nine jobs "
    "arrives after 3 hours, which no scheduler can change, so the ratio is small; with jobs four times as long, "
    "or with 60 jobs, it equals the paper's. JCT: the ratio stays below 2.39 for all job lengths. In the paper "
    "Optimus also balances parameter blocks, where the baselines use MXNet's assignment (for ResNet-50 its fullest "
    "server holds 1.04 to 1.66 times the mean, by our `parameter_assignment`), and replaces stragglers. With "
    "exchanges 1.5 times as long for the baselines the ratio is 1.8; 2.39 would need about three times. The lengths "
    "and the mix of the paper's jobs are not published. The ratio also depends on the kind of prediction errors: if "
    "speeds are off independently at each point instead of as a fitted curve, the marginal gains that Optimus uses "
    "are noise; it stops at a quarter of the servers and two thirds of the workers, and its advantage is smaller. "
    "Tetris gives a few short jobs 10 to 16 bundles each and lets the others wait, although a job is hardly faster "
    "with more than a few bundles; the paper's ratio for Tetris is not known to us."
)


def _rows(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratio of each metric to Optimus', ours and the paper's."""
    ours = one["schedulers"]["optimus"]
    return [
        {
            "setting": one["setting"],
            "scheduler": name,
            "metric": metric,
            "ours": figures[f"{metric}_s"] / ours[f"{metric}_s"],
            "paper": PAPER.get((name, metric)) if name != "optimus" else 1.0,
            "hours": figures[f"{metric}_s"] / 3600,
        }
        for name, figures in one["schedulers"].items()
        for metric in ("jct", "makespan")
    ]


def render(result: dict[str, Any]) -> str:
    """A table for the terminal."""
    lines = [f"Optimus (EuroSys'18): times as long as with Optimus, mean of {result['runs']} runs"]
    for one in result["settings"]:
        lines += ["", one["setting"], f"  {'':16} {'avg JCT':>9} {'ours':>6} {'paper':>6}"]
        lines[-1] += f" {'makespan':>10} {'ours':>6} {'paper':>6} {'restarts':>9}"
        for name, figures in one["schedulers"].items():
            line = f"  {name:16}"
            for metric, width in (("jct", 8), ("makespan", 9)):
                row = next(
                    r
                    for r in result["rows"]
                    if (r["setting"], r["scheduler"], r["metric"]) == (one["setting"], name, metric)
                )
                paper = "-" if row["paper"] is None else f"{row['paper']:.2f}"
                line += f" {row['hours']:{width}.2f}h {row['ours']:6.2f} {paper:>6}"
            lines.append(f"{line} {figures['restart_part']:9.1%}")
    return "\n".join([*lines, "", result["why"]])


def plot(result: dict[str, Any], path_png: str | Path) -> None:
    """Bars of average JCT and makespan relative to Optimus."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = result["settings"]
    columns = min(len(settings), 3)
    lines = -(-len(settings) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(6 * columns, 3.6 * lines), squeeze=False)
    for axis in axes.flat[len(settings) :]:
        axis.set_visible(False)
    for axis, one in zip(axes.flat, settings):
        names = list(one["schedulers"])
        for offset, metric in ((-0.2, "jct"), (0.2, "makespan")):
            rows = [r for r in _rows(one) if r["metric"] == metric]
            at = np.arange(len(names)) + offset
            axis.bar(at, [r["ours"] for r in rows], 0.38, label=f"{metric}, ours")
            published = [(x, r["paper"]) for x, r in zip(at, rows) if r["paper"] is not None]
            axis.plot(*zip(*published), "k_", markersize=14, label=None if offset < 0 else "paper")
        axis.set_xticks(np.arange(len(names)), names, rotation=20, ha="right")
        axis.set_title(one["setting"])
        axis.set_ylabel("times Optimus")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path_png, dpi=120)
    plt.close(figure)
