"""Sharing, pre-scheduling and event-driven release on one GPU, with consecutive single-GPU jobs.

The decisions are those of `placement.sharing` and `placement.preschedule`. The times to prepare and to clean up
are not published. They are chosen so that polling costs what the paper reports; the saving by pre-scheduling is then
a prediction. Utilisations are not published either; 60 % gives the paper's mean saving, so the experiment shows
the rule of sharing and its limit, but does not test the size of the saving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.placement.placer import Unplaced
from shoal.placement.preschedule import Running, find_ending_gpu, may_enter
from shoal.placement.sharing import GpuUse, find_shared_gpu

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Workload:
    """Consecutive jobs on one GPU. pre and post do not use the GPU; `exclusive_min` (for all jobs) is the paper's."""

    name: str
    jobs: int
    exclusive_min: float
    pre_s: float
    post_s: float

    @property
    def busy_s(self) -> float:
        """Seconds that one job uses the GPU."""
        return self.exclusive_min * 60 / self.jobs - self.pre_s - self.post_s


#: Jobs and minutes are the paper's. The times to prepare and clean up follow from the cost of polling there: 10 and
#: 15 per cent of the time between jobs.
WORKLOADS = {
    "k80": (Workload("CNN", 8, 42, 9.0, 3.5), Workload("NeuMF", 4, 192, 17.0, 4.5)),
    "t4": (Workload("CNN", 8, 30, 9.0, 3.5), Workload("NeuMF", 4, 159, 17.0, 4.5)),
}
GPU_MB, JOB_MB = 16_000.0, 4_096.0
UTILISATION = 0.6
HEARTBEAT_S = 5.0
PAPER_SHARING = {("k80", "CNN"): 38, ("k80", "NeuMF"): 33, ("t4", "CNN"): 40, ("t4", "NeuMF"): 41}
PAPER_PRE = {("k80", "CNN"): 50, ("k80", "NeuMF"): 77, ("t4", "CNN"): 18, ("t4", "NeuMF"): 30}
PAPER_EVENT = {("k80", "CNN"): 15, ("k80", "NeuMF"): 10, ("t4", "CNN"): 16, ("t4", "NeuMF"): 10}


def idle_s(work: Workload, rng: Rng, *, event_driven: bool, pre_schedule: bool) -> float:
    """Total seconds between the jobs in which the GPU is idle."""
    idle = 0.0
    for _ in range(work.jobs - 1):
        retry_s = float(rng.uniform(0.5, 1.0))  # until the queue retries
        heard_s = 0.0 if event_driven else float(rng.uniform(0, HEARTBEAT_S))
        gap_s = work.post_s + heard_s + retry_s + work.pre_s
        if pre_schedule:
            gap_s = min(gap_s, _gap_when_launched_early(work, float(rng.uniform(0, HEARTBEAT_S)), retry_s))
        idle += gap_s
    return idle


def _gap_when_launched_early(work: Workload, phase_s: float, retry_s: float) -> float:
    """Idle seconds if the next job is launched at the first retry that the rule allows, and enters by the rule."""
    total_s = work.pre_s + work.busy_s + work.post_s
    launch_s = max(total_s - work.post_s - work.pre_s - 20.0, 0.0)  # earlier retries are refused anyway
    while isinstance(find_ending_gpu([Running(launch_s, total_s, work.post_s)], work.pre_s), Unplaced):
        launch_s += retry_s
    quiet_s = total_s - work.post_s
    report_s = quiet_s + phase_s - HEARTBEAT_S
    utilisations = [1.0]
    while not may_enter(utilisations, GPU_MB - JOB_MB, JOB_MB, JOB_MB):
        report_s += HEARTBEAT_S
        utilisations.append(0.0 if report_s >= quiet_s else 1.0)
    return max(launch_s + work.pre_s, report_s) - quiet_s


def shared_min(exclusive_min: float, utilisation: float) -> float:
    """Minutes for all jobs if two may share the GPU: both slow down if their utilisations exceed 1."""
    gpu = GpuUse(GPU_MB, JOB_MB, (utilisation,))
    if find_shared_gpu([gpu], JOB_MB, utilisation) != 0:
        return exclusive_min
    return exclusive_min / 2 * max(1.0, 2 * utilisation)


def rows(seed: int) -> list[dict[str, Any]]:
    """The saving of each of the three techniques by workload, and the mean, in per cent: ours and the paper's."""
    found: list[dict[str, Any]] = []
    for gpu, works in WORKLOADS.items():
        for work in works:
            key = (gpu, work.name)
            polled, on_events, early = (
                _mean_idle_s(work, seed, event_driven=event_driven, pre_schedule=pre_schedule)
                for event_driven, pre_schedule in ((False, False), (True, False), (True, True))
            )
            shared = shared_min(work.exclusive_min, UTILISATION)
            found += [
                _row(*key, "sharing: time", shared, work.exclusive_min, PAPER_SHARING[key]),
                _row(*key, "pre-scheduling: idle time", early, on_events, PAPER_PRE[key]),
                _row(*key, "event-driven: idle time", on_events, polled, PAPER_EVENT[key]),
            ]
    for what in dict.fromkeys(r["what"] for r in found):
        of_it = [r for r in found if r["what"] == what]
        ours, paper = (float(np.mean([r[key] for r in of_it])) for key in ("ours", "paper"))
        found.append({"gpu": "mean", "jobs": "", "what": what, "ours": ours, "paper": paper})
    return found


def _row(gpu: str, jobs: str, what: str, with_it: float, without: float, paper: float) -> dict[str, Any]:
    return {"gpu": gpu, "jobs": jobs, "what": what, "ours": 100 * (1 - with_it / without), "paper": paper}


def _mean_idle_s(work: Workload, seed: int, *, event_driven: bool, pre_schedule: bool) -> float:
    rng = np.random.default_rng(seed)
    runs = [idle_s(work, rng, event_driven=event_driven, pre_schedule=pre_schedule) for _ in range(200)]
    return float(np.mean(runs))
