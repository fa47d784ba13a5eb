"""The first use of a policy compiles its kernels: each once, not again for arrays of another layout."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from numba.core.dispatcher import Dispatcher
from shoal.cli.main import main
from shoal.sim.samples import sample_path

jobs, cluster = (str(sample_path(name)) for name in ("jobs.csv", "cluster.yaml"))
sys.argv = ["shoal", "sim", "run", jobs, "-c", cluster, "--policy", sys.argv[1], "-o", "json"]
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


@pytest.mark.parametrize("policy", ["afs-l", "afs-p", "optimus", "gandiva-fair", "fair-afs"])
def test_each_kernel_is_compiled_for_one_kind_of_arguments(policy: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, policy], capture_output=True, text=True, check=True)
    kernels = json.loads(ran.stdout.splitlines()[-1])
    assert sum(map(bool, kernels.values())) > 5, "the run used its kernels"
    assert {name: kinds for name, kinds in kernels.items() if len(kinds) > 1} == {}
