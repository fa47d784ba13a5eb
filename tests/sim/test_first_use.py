"""The first use of a policy compiles its kernels: each once, not again for arrays of another layout, and some by a
second process."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from shoal.core.cluster import Cluster
from shoal.sim import compile_ahead, kernels_ahead

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
from shoal.sim.kernels_ahead import AHEAD

wrong = [str(k) for k, types in AHEAD.get(sys.argv[-3], ()) if k.signatures != [types]]
print()
print(json.dumps([kernels, wrong]))
"""


@pytest.mark.parametrize("policy", ["afs-l", "afs-p", "optimus", "gandiva-fair", "fair-afs"])
def test_each_kernel_is_compiled_for_one_kind_of_arguments(policy: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, policy], capture_output=True, text=True, check=True)
    kernels, wrong_ahead = json.loads(ran.stdout.splitlines()[-1])
    assert sum(map(bool, kernels.values())) > 5, "the run used its kernels"
    assert {name: kinds for name, kinds in kernels.items() if len(kinds) > 1} == {}
    assert not wrong_ahead, "what a second process compiles is what the policy uses"


class Process(subprocess.Popen):
    begun: ClassVar = []

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.begun.append(self)


@pytest.mark.parametrize(
    ("policy", "cluster", "processes"),
    [
        ("gandiva-fair", Cluster.of(2, 4), 1),
        ("gandiva-fair", Cluster.pool(8), 0),
        ("fifo", Cluster.of(2, 4), 0),
    ],
)
def test_a_second_process_helps_where_there_is_much_to_compile_and_ends_with_the_run(
    policy, cluster, processes, monkeypatch
):
    monkeypatch.setattr(Process, "begun", [])
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(compile_ahead, "_has_one_to_spare", lambda: True)
    said = []
    with compile_ahead.compile_ahead(policy, cluster, lambda: said.append("compiling")) as compiles:
        assert not Process.begun, "nothing is compiled yet"
        compiles()
        assert said == ["compiling"]
        assert len(Process.begun) == processes
    assert all(process.returncode is not None for process in Process.begun)


def test_the_second_process_compiles_one_kernel_after_the_other_until_it_is_alone(monkeypatch):
    compiled, parents = [], iter([7, 7, 7, 1])
    kernels = [
        SimpleNamespace(compile=lambda types, name=name: compiled.append((name, types))) for name in "abc"
    ]
    monkeypatch.setitem(kernels_ahead.AHEAD, "some", tuple((kernel, ("i8",)) for kernel in kernels))
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    compile_ahead.main("some")
    assert compiled == [("a", ("i8",)), ("b", ("i8",))], "the first process has ended before the last"
