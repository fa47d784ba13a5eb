"""Runs of the sample trace, made once for all tests of the report."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest

from shoal.sim.costs import Costs
from shoal.sim.report.run_series import series_of
from shoal.sim.runner import Result, Setup, load, run
from shoal.sim.samples import sample_path

SETUP = Setup(sample_path("jobs.csv"), sample_path("profiles.csv"), "afs-p", gpus=64)


def summary_of(result: Result, kind: str = "none"):
    return {"label": f"{result.record.policy} / {kind}", **result.summary, "costs": kind, "seed": 0}


def unpacked(column):
    """What the page's script makes of a column: plain values."""

    def inflate(text):
        return zlib.decompress(base64.b64decode(text))

    if column["kind"] == "words":
        words = json.loads(inflate(column["words"]))
        return [words[i] for i in unpacked(column["which"])]
    kind = np.dtype("<" + column["kind"])
    planes = np.frombuffer(inflate(column["data"]), np.uint8).reshape(kind.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(kind)[:, 0].tolist()


def shares_by_job(record):
    """Per job the changes of its share, each (seconds since its submission, GPUs from then on)."""
    log = [[] for _ in record.jobs]
    for at_s, j, gpus in zip(record.change_s, record.change_job, record.change_gpus):
        log[j].append((at_s - record.jobs[j].submit_s, gpus))
    return log


@pytest.fixture(scope="session")
def results() -> dict[str, Result]:
    """{label: result} of fifo, and of afs-p by cost model."""
    inputs = load(SETUP)
    setups = {"fifo / none": replace(SETUP, policy="fifo")}
    for kind in ("none", "restart", "concurrent"):
        setups[f"afs-p / {kind}"] = replace(SETUP, costs=Costs(kind, restart_s=120.0))
    return {label: run(setup, inputs=inputs) for label, setup in setups.items()}


@pytest.fixture(scope="session")
def series(results):
    """The series of all these runs."""
    return [series_of(r, summary_of(r, label.split(" / ")[1])) for label, r in results.items()]


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Result:
    """fifo with guests, on fewer GPUs than the trace needs."""
    needs, models = tmp_path_factory.mktemp("needs") / "needs.csv", load(SETUP).profiles
    needs.write_text("model,gpu_util,gpu_mem_mb\n" + "".join(f"{model},40,4000\n" for model in models))
    return run(replace(SETUP, policy="fifo", gpus=16, needs=needs, share=True))


@pytest.fixture(scope="session")
def mixed() -> Result:
    """max-min on the mixed sample cluster of five users: many changes, lending and borrowing."""
    return run(replace(SETUP, policy="max-min", gpus=None, cluster=sample_path("cluster.yaml")))
