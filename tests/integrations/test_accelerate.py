"""Real processes: a script with Accelerate, resized and hit by a lost worker."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from example_lab import ExampleLab

import torch
from shoal.executors.zygote import Zygote


def test_a_resized_script_with_accelerate_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, zygote: Zygote
) -> None:
    lab = ExampleLab(tmp_path, zygote, "accelerate/train.py")
    expected, found = (torch.load(out / "model.pt") for out in (lab.alone(), lab.resized()))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-4), name
