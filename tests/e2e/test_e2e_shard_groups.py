"""A model that is sharded over groups of two workers, under the real server: the job has multiples of two GPUs."""

import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "shard_groups.py"
pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)


def await_size(cluster, name, gpus):
    cluster.shoal("wait", name, "--for", f"size={gpus}", "--timeout", "150s", code=0, timeout=180)


def test_shard_groups_grow_and_shrink_by_whole_groups(shared, tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    shared.shoal("run", "-d", "--name", "groups", "--gpus", "2..8:2", "--", *command, code=0)
    await_size(shared, "groups", 4)
    shared.shoal("run", "-d", "--name", "other", "--gpus", "1", "--", "sleep", "1000", code=0)
    await_size(shared, "groups", 2)
    shared.shoal("cancel", "other", "-y", "--grace", "0s", code=0)
    await_size(shared, "groups", 4)
    (tmp_path / "end").touch()
    shared.shoal("wait", "groups", "--timeout", "60s", code=0, timeout=90)
    rows = [tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [step for step, _ in rows] == list(range(len(rows))), "every step counts once"
    assert {size for _, size in rows} == {2, 4}
    job = shared.json("show", "groups")
    assert job["restarts"] == 0
    assert job["resizes"] >= 2


def test_a_range_that_is_no_multiple_of_the_groups_fails_with_one_that_is(shared, tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    shared.shoal("run", "-d", "--name", "odd", "--gpus", "1..4", "--", *command, code=0)
    assert shared.shoal("wait", "odd", "--timeout", "90s", timeout=120).returncode != 0
    assert "needs multiples of 2 GPUs, and the job has 1..4" in shared.shoal("logs", "odd").stdout
