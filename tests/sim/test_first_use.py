"""The first use of a policy compiles its kernels: each for one kind of arguments, once on a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from numba.core.dispatcher import Dispatcher
from shoal.cli.main import main
from shoal.sim.samples import sample_path

policy, *where = sys.argv[1:]
jobs, cluster = (str(sample_path(name)) for name in ("jobs.csv", "cluster.yaml"))
where = ["-c", cluster] if where else ["--gpus", "64"]
sys.argv = ["shoal", "sim", "run", jobs, *where, "--policy", policy, "-o", "json"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
kernels = {
    f"{name}.{kernel.__name__}": [str(s) for s in kernel.signatures]
    for name, module in list(sys.modules.items())
    if name.startswith("shoal.")
    for kernel in vars(module).values()
    if isinstance(kernel, Dispatcher) and kernel.__module__ == name
}
print()
print(json.dumps(kernels))
"""


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        *((p, ["nodes"]) for p in ("fifo", "afs-l", "afs-p", "optimus", "gandiva-fair", "fair-afs")),
        ("fair-afs", []),
    ],
)
def test_each_kernel_is_compiled_for_one_kind_of_arguments(policy, where) -> None:
    """Not once more for arrays of another layout, or for other integers."""
    command = [sys.executable, "-c", SCRIPT, policy, *where]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    kernels = json.loads(ran.stdout.splitlines()[-1])
    assert sum(map(bool, kernels.values())) > 5, "the run used its kernels"
    assert {name: kinds for name, kinds in kernels.items() if len(kinds) > 1} == {}


def test_the_first_use_prints_a_message_and_the_second_finds_the_kernels_in_the_cache(tmp_path):
    command = [sys.executable, "-m", "shoal.cli.main", "sim", "run", "--sample", "--policy", "fifo"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert "first use" in first.stderr
    assert "first use" not in second.stderr
