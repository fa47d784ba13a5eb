"""Time to generate, write and read large traces; one JSON document on stdout.

python bench/generate.py [jobs]
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoal.core.cluster import Cluster
from shoal.sim.generate import ARRIVALS, Recipe, generate
from shoal.sim.inputs import read_jobs, read_profiles, write_jobs
from shoal.sim.samples import sample_path

GPUS = 2_490


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 3)


def main(jobs: int) -> None:
    profiles = read_profiles(sample_path("profiles.csv"))
    cluster = Cluster.pool(GPUS)
    result: dict[str, object] = {"jobs": jobs, "gpus": GPUS}
    with tempfile.TemporaryDirectory() as folder:
        for arrivals in ARRIVALS:
            recipe = Recipe(jobs=jobs, gpus=GPUS, arrivals=arrivals)
            path = Path(folder) / f"{arrivals}.csv"
            result[f"generate_and_write_{arrivals}_s"] = seconds(
                lambda recipe=recipe, path=path: write_jobs(
                    path, generate(recipe, profiles, np.random.default_rng(0))
                )
            )
        result["csv_bytes"] = path.stat().st_size
        result["read_csv_s"] = seconds(lambda: read_jobs(path, profiles, cluster))
        tenth, parquet = Path(folder) / "tenth.csv", Path(folder) / "jobs.parquet"
        trace = generate(Recipe(jobs=jobs, gpus=GPUS), profiles, np.random.default_rng(0))
        write_jobs(tenth, trace.head(jobs // 10))
        result["read_csv_a_tenth_s"] = seconds(lambda: read_jobs(tenth, profiles, cluster))
        write_jobs(parquet, trace)
        result["read_parquet_s"] = seconds(lambda: read_jobs(parquet, profiles, cluster))
    result["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
