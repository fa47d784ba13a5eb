"""The first use of a policy compiles its kernels: each once, not again for arrays of another layout, and some by a
second process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from shoal.core.cluster import Cluster, User
from shoal.sim import compile_ahead, kernels_ahead
from shoal.sim.inputs import read_cluster
from shoal.sim.samples import sample_path

SCRIPT = """
import json, sys
from numba.core.dispatcher import Dispatcher
from shoal.cli.main import main
from shoal.sim.kernels_ahead import ahead
from shoal.sim.samples import sample_path

policy, *traits = sys.argv[1:]
jobs, cluster = (str(sample_path(name)) for name in ("jobs.csv", "cluster.yaml"))
where = ["-c", cluster] if "nodes" in traits else ["--gpus", "64"]
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
# One that another kernel calls is not even loaded if that one was compiled before.
wrong = [str(kernel) for kernel, types in ahead(policy, traits) if kernel.signatures not in ([types], [])]
used = sum(bool(kernel.signatures) for kernel, types in ahead(policy, traits))
print()
print(json.dumps([kernels, wrong, used]))
"""

ON_NODES = ("nodes", "types", "users")


@pytest.mark.parametrize(
    ("policy", "traits"),
    [
        *((policy, ON_NODES) for policy in ("fifo", "afs-l", "afs-p", "optimus", "gandiva-fair", "fair-afs")),
        ("fair-afs", ("users",)),
    ],
)
def test_each_kernel_is_compiled_for_one_kind_of_arguments(policy, traits) -> None:
    command = [sys.executable, "-c", SCRIPT, policy, *traits]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    kernels, wrong_ahead, used_ahead = json.loads(ran.stdout.splitlines()[-1])
    assert sum(map(bool, kernels.values())) > 5, "the run used its kernels"
    assert {name: kinds for name, kinds in kernels.items() if len(kinds) > 1} == {}
    assert used_ahead >= 4
    assert not wrong_ahead, "what a second process compiles is what the policy uses"


def test_what_decides_which_kernels_are_needed():
    users = tuple(User(name) for name in ("ada", "ben"))
    assert kernels_ahead.traits_of(Cluster.pool(8)) == []
    assert kernels_ahead.traits_of(Cluster.of(2, 4)) == ["nodes"]
    assert kernels_ahead.traits_of(read_cluster(sample_path("cluster.yaml"))) == [*ON_NODES]
    assert kernels_ahead.traits_of(replace(Cluster.pool(8), users=users)) == ["users"]


class Process(subprocess.Popen):
    begun: ClassVar = []

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.begun.append(self)


@pytest.mark.parametrize(("processors", "processes"), [(2, 1), (1, 0)])
def test_a_second_process_helps_where_there_is_a_processor_for_it_and_ends_with_the_run(
    processors, processes, monkeypatch
):
    monkeypatch.setattr(Process, "begun", [])
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(compile_ahead, "_processors", lambda: processors)
    said = []
    with compile_ahead.compile_ahead("fifo", Cluster.of(2, 4), lambda: said.append("compiling")) as compiles:
        assert not Process.begun, "nothing is compiled yet"
        compiles()
        assert said == ["compiling"]
        assert len(Process.begun) == processes
    assert all(process.returncode is not None for process in Process.begun)


@pytest.fixture
def keep_handlers():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def compile_in(monkeypatch, compiles):
    """A second process that is to compile kernels a, b and c by calling this."""
    kernels = [SimpleNamespace(compile=lambda types, name=name: compiles(name, types)) for name in "abc"]
    asked = []

    def ahead(policy, traits):
        asked.append((policy, *traits))
        return [(kernel, ("i8",)) for kernel in kernels]

    monkeypatch.setattr(kernels_ahead, "ahead", ahead)
    compile_ahead.main(7, "some", "nodes", "users")
    assert asked == [("some", "nodes", "users")]


@pytest.mark.usefixtures("keep_handlers")
def test_the_second_process_compiles_one_kernel_after_the_other_until_it_is_alone(monkeypatch):
    compiled, parents = [], iter([7, 7, 1])
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    compile_in(monkeypatch, lambda name, types: compiled.append((name, types)))
    assert compiled == [("a", ("i8",)), ("b", ("i8",))], "the first process has ended before the last"


@pytest.mark.usefixtures("keep_handlers")
def test_the_second_process_compiles_nothing_if_it_is_alone_from_the_start(monkeypatch):
    monkeypatch.setattr("os.getppid", lambda: 1)
    compile_in(monkeypatch, lambda name, types: pytest.fail("nobody needs it"))


@pytest.mark.usefixtures("keep_handlers")
def test_the_second_process_does_not_end_while_it_writes(monkeypatch):
    """numba writes the name of a kernel first, then the kernel: only both are right."""
    events = []
    monkeypatch.setattr("os.getppid", lambda: 7)
    monkeypatch.setattr("os._exit", lambda code: events.append("ended at once"))
    space = {"__name__": "numba.core.caching", "signal": signal, "events": events}
    exec("def save():\n signal.raise_signal(signal.SIGTERM)\n events.append('written')", space)
    compile_in(monkeypatch, lambda name, types: space["save"]())
    assert events == ["written"], "and no further kernel"
    events.clear()
    compile_in(monkeypatch, lambda name, types: signal.raise_signal(signal.SIGTERM))
    assert events == ["ended at once"]
