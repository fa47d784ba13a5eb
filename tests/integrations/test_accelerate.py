"""Real processes: a script with Accelerate, resized and hit by a lost worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from elastic_lab import QUICK
from example_lab import ExampleLab

import torch
from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev


def test_a_resized_script_with_accelerate_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, zygote: Zygote
) -> None:
    lab = ExampleLab(tmp_path, zygote, "accelerate/train.py")
    expected, found = (torch.load(out / "model.pt") for out in (lab.alone(), lab.resized()))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-4), name


@pytest.mark.parametrize("way", ["prepare", "wrap"])
def test_the_job_knows_rank_0_and_all_workers_and_accelerate_only_this_one(
    tmp_path: Path, zygote: Zygote, way: str
) -> None:
    script = str(Path(__file__).parent / "scripts" / "accelerate_ways.py")
    out = tmp_path / "out"
    env = {"OUTPUT_DIR": str(out), "WAY": way}
    with LocalJob([script], 2, directory=tmp_path, zygote=zygote, timing=QUICK, env=env) as job:
        end = job.wait_end()
        assert isinstance(end, ev.JobFinished), (end, job.logs())
        job.wait_gone(60)
    found = [json.loads(file.read_text()) for file in out.glob("*.json")]
    assert sorted(each.pop("main") for each in found) == [False, True]
    # The rate is halved once for each step. Accelerate believes that there is one process.
    assert found == [{"rate": [0.025], "steps": 2, "ranks": [0, 1], "accelerate": [1, 1]}] * 2


def test_what_prepare_cannot_split_is_refused_with_advice() -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from shoal.integrations.accelerate import prepare

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(4, 1)
    with pytest.raises(ValueError, match="accumulate=n"):
        prepare(Accelerator(cpu=True, gradient_accumulation_steps=2), model, optimizer, DataLoader(data))
    with pytest.raises(ValueError, match="give a torch DataLoader"):
        prepare(Accelerator(cpu=True, gradient_accumulation_steps=1), model, optimizer, [data])
