"""`--gpus auto`: the right number where something is known, and a plain word where nothing is."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.job import GpuRange
from shoal.knowledge.auto_gpus import FinishedRun, choose_gpus, trusted_speed
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.unknown import Unknown

COMMAND = ["python", "train.py", "--batch_size=32", "--epochs=3"]
NOTHING = Unknown("nothing was measured")


def amdahl(gpus, serial):
    return 1.0 / (serial + (1 - serial) / gpus)


def runs(serial, count=60, sizes=(1, 2, 4, 8), seed=0):
    """Finished jobs at several sizes and lengths, their times 3 % noisy."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        gpus, epochs = int(rng.choice(sizes)), int(rng.integers(1, 6))
        seconds = 600.0 * epochs / amdahl(gpus, serial) * rng.normal(1.0, 0.03)
        command = ["python", "train.py", "--batch_size=32", f"--epochs={epochs}"]
        made.append(FinishedRun(command, gpus, float(seconds)))
    return made


def test_measured_speeds_tell_the_last_gpu_that_is_worth_its_place():
    speed = np.array([0.0, 1.0, 1.9, 2.6, 2.9, 3.0])
    told = choose_gpus(COMMAND, 5, measured=speed, finished=[])
    assert told.known
    assert told.gpus == GpuRange(1, 3)
    assert told.why == (
        "GPU 3 adds 0.70 of a GPU's worth and GPU 4 only 0.30, below 0.5, "
        "by speeds measured of the same command; using 1..3"
    )
    assert choose_gpus(COMMAND, 5, measured=speed, finished=[], resizes=False).gpus == GpuRange(3, 3)
    assert choose_gpus(COMMAND, 2, measured=speed, finished=[]).gpus == GpuRange(1, 2)


@pytest.mark.parametrize(("serial", "least", "most"), [(0.0, 8, 8), (0.9, 1, 1)])
def test_without_measured_speeds_the_times_of_finished_jobs_do(serial, least, most):
    told = choose_gpus(COMMAND, 8, measured=NOTHING, finished=runs(serial))
    assert told.known
    assert least <= told.gpus.max <= most
    assert "finished jobs like it" in told.why


def test_measured_speeds_count_more_than_times_of_other_jobs():
    told = choose_gpus(COMMAND, 8, measured=np.array([0.0, 1.0, 1.1]), finished=runs(0.0))
    assert told.gpus == GpuRange(1, 1)


@pytest.mark.parametrize(
    ("finished", "command", "why"),
    [
        ([], COMMAND, "there are none"),
        (runs(0.1, sizes=(4,)), COMMAND, " ran on 4 GPUs)"),
        (runs(0.1, count=6), COMMAND, "only 6 jobs of the same program finished at a fixed size, and 10"),
        (runs(0.1), [*COMMAND, "--amp"], "amp was never seen"),
        (runs(0.1), COMMAND[:3], "does not give epochs"),
        (runs(0.1, sizes=(2, 4)), COMMAND, "ran on one GPU"),
    ],
)
def test_where_nothing_is_known_the_answer_says_why_and_what_is_used_instead(finished, command, why):
    told = choose_gpus(command, 8, measured=NOTHING, finished=finished)
    assert not told.known
    assert told.gpus == GpuRange(1, 8)
    assert told.why.startswith("unknown, because nothing was measured; and ")
    assert why in told.why
    assert told.why.endswith("; using 1..8")
    assert choose_gpus(command, 8, measured=NOTHING, finished=finished, resizes=False).gpus == GpuRange(1, 1)


def test_assumed_speeds_are_no_knowledge():
    known = SpeedEstimator(8, 8)
    assert isinstance(trusted_speed(known.table("v100")), Unknown)
    known.observe(4, 1, "v100", 0.25)
    one = trusted_speed(known.table("v100"))
    assert np.isnan(one[[1, 2, 8]]).all()
    assert one[4] == pytest.approx(4.0)
    assert not choose_gpus(COMMAND, 8, measured=one, finished=[]).known
    known.observe(1, 1, "v100", 1.0)
    both = trusted_speed(known.table("v100"))
    assert choose_gpus(COMMAND, 8, measured=both, finished=[]).gpus == GpuRange(1, 4)


def test_finished_jobs_that_changed_their_size_are_counted_too():
    told = choose_gpus(COMMAND, 8, measured=NOTHING, finished=runs(0.1, sizes=(4,)), resized=3)
    count = len(list(runs(0.1, sizes=(4,))))
    assert f"({count} ran on 4 GPUs; 3 changed size, shared a GPU or restarted)" in told.why
