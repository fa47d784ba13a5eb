"""Third parties add a policy with one class and an entry point: the file that the docs show."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core import named
from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange, Job
from shoal.core.options import make_options
from shoal.core.profile import Profile
from shoal.policies import registry
from shoal.sim.engine import Simulation

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def custom():
    path = DOCS / "examples" / "youngest_first.py"
    spec = importlib.util.spec_from_file_location("youngest_first", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.YoungestFirst


def test_the_policy_of_the_docs_runs_in_the_simulator(custom):
    profiles = {"m": Profile.of("m", {n: 1.0 / n for n in range(1, 9)})}
    jobs = [Job(f"j{i}", float(i), GpuRange(1, 8), 1, model="m", iterations=40.0) for i in range(3)]
    record = Simulation(jobs, profiles, Cluster.pool(4), custom()).run()
    # Each newcomer takes all four GPUs: the last ends first.
    assert record.finish_s.tolist() == [30.0, 21.0, 12.0]


def test_its_options_are_read_from_text_and_checked(custom):
    assert make_options(custom, {"most": "2"}).most == 2
    with pytest.raises(ShoalError, match="did you mean 'most'"):
        make_options(custom, {"mots": "2"})
    with pytest.raises(ShoalError, match="must be a whole number"):
        make_options(custom, {"most": "two"})


def test_an_entry_point_of_an_installed_package_makes_it_known_by_name(tmp_path):
    shutil.copy(DOCS / "examples" / "youngest_first.py", tmp_path)
    about = tmp_path / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    shown = re.search(r'\[project\.entry-points\."(.+)"\]\n(.+)\n', (DOCS / "policies.md").read_text())
    entry = shown[2].replace('"', "").replace("my_package.", "")
    (about / "entry_points.txt").write_text(f"[{shown[1]}]\n{entry}\n")
    words = "sim run --sample -o json --policy youngest-first --option most=2"
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", *words.split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policy"] == "youngest-first"


def test_a_policy_that_cannot_be_loaded_is_reported_in_one_line_and_does_not_hide_the_others(monkeypatch):
    class Entry:
        name, value = "missing", "my_package.nope:Nope"

        def load(self):
            raise ModuleNotFoundError("No module named 'my_package'")

    monkeypatch.setattr(named, "entry_points", lambda group: [Entry()] if group == "shoal.policies" else [])
    with pytest.raises(ShoalError, match=r"'missing' \(my_package.nope:Nope\) cannot be loaded: ModuleNot"):
        registry.policy_class("missing")
    assert set(registry.policy_classes()) == set(registry.BUILT_IN)
    (told,) = registry.unusable_policies()
    assert "my_package.nope:Nope" in told


def test_a_policy_that_gives_out_more_gpus_than_exist_is_stopped(custom):
    class Careless(custom):
        name = "careless"

        def shares(self, view, gpus, now_s):
            return view.max_gpus.copy()

    jobs = [Job(f"j{i}", 0.0, GpuRange(1, 4), 1, model="m", iterations=10.0) for i in range(3)]
    simulation = Simulation(jobs, {"m": Profile.of("m", {1: 1.0, 4: 0.3})}, Cluster.pool(4), Careless())
    with pytest.raises(ShoalError, match="'careless' gave away 12 GPUs of 4"):
        simulation.run()


def test_the_docs_show_the_file_as_it_is(custom):
    source = (DOCS / "examples" / "youngest_first.py").read_text()
    assert f"```python\n{source}```" in (DOCS / "policies.md").read_text()


def test_the_docs_list_every_policy():
    text = (DOCS / "policies.md").read_text()
    for name in registry.BUILT_IN:
        assert f"| `{name}` |" in text


def test_an_unknown_policy_is_refused_with_a_suggestion():
    for wrong in ("afsl", "AFS-L"):
        with pytest.raises(ShoalError, match="did you mean 'afs-l'"):
            registry.policy_class(wrong)
