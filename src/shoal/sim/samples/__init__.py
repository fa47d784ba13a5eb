"""Sample inputs, to try the simulator without traces of one's own.

`profiles.csv` comes from an analytic model, not from measurements: with n GPUs an iteration takes
compute / (speed of the GPU type · n^0.97) + fixed + gradients · 2(n-1)/n / bandwidth, where the bandwidth
is that of a node up to 8 GPUs and that of the network beyond. `jobs.csv` is a generated trace of 300 jobs for
64 GPUs (load 0.9, diurnal arrivals, more large jobs than Philly, none longer than a day). `cluster.yaml` is a
mixed cluster of that size with the users of the jobs.
"""

from __future__ import annotations

from pathlib import Path

from shoal.core.errors import ShoalError, did_you_mean

_HERE = Path(__file__).parent
SAMPLES = ("profiles.csv", "jobs.csv", "cluster.yaml")


def sample_path(name: str) -> Path:
    """The path of a sample: `profiles.csv`, `jobs.csv` or `cluster.yaml`."""
    if name not in SAMPLES:
        raise ShoalError(f"there is no sample {name!r}; {did_you_mean(name, SAMPLES)}")
    return _HERE / name
