"""Real processes: the examples of shoal.torch, as they are, resized three times and hit by the loss of rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from example_lab import ExampleLab

from shoal.executors.zygote import Zygote


@pytest.mark.parametrize("example", ["digits.py", "characters.py", "emulated.py"])
def test_an_example_trains_to_its_end(tmp_path: Path, zygote: Zygote, example: str) -> None:
    lab = ExampleLab(tmp_path, zygote, f"elastic/{example}")
    lab.resized(SHOAL_CHECKED="1")  # it fails unless the job finishes
