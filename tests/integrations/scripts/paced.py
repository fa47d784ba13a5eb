"""Runs an example with slow steps until the test says hurry: paced.py EXAMPLE. The test resizes it meanwhile."""

import os
import runpy
import sys
import time
from pathlib import Path

import shoal.torch as shoal

HURRY = Path(os.environ["LAB_DIR"]) / "hurry"
init = shoal.init


def paced(**options):
    job = init(**options)
    settle = job.parts.steps.settle

    def slow(asked):
        if not HURRY.exists() and not job.rehearsing:
            time.sleep(
                0.05 if job.position.step < 40 else 1.0
            )  # the test needs time, and the job must not end
        return settle(asked)

    job.parts.steps.settle = slow
    return job


shoal.init = paced
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
