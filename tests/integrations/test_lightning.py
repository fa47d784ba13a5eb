"""Real processes: a Lightning script, resized and hit by a lost worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from example_lab import ExampleLab

import torch
from shoal.executors.zygote import Zygote


def final(output: Path) -> dict[str, Any]:
    return torch.load(output / "last.ckpt", weights_only=False)


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "manual with two optimizers"])
def test_a_resized_trainer_ends_with_the_weights_metrics_and_checkpoints_of_an_undisturbed_one(
    tmp_path: Path, zygote: Zygote, by_hand: bool
) -> None:
    lab = ExampleLab(tmp_path, zygote, "lightning/train.py")
    env = {"MANUAL": "1", "EPOCHS": "3"} if by_hand else {"EPOCHS": "4"}
    expected, found = final(lab.alone(**env)), final(lab.resized(**env))
    assert (found["epoch"], found["global_step"]) == (expected["epoch"], expected["global_step"])
    for name, value in expected["state_dict"].items():
        assert torch.allclose(found["state_dict"][name], value, atol=1e-4), name
    for name, state in expected["callbacks"].items():
        if name.startswith("EarlyStopping"):
            assert found["callbacks"][name]["wait_count"] == state["wait_count"]
            assert float(found["callbacks"][name]["best_score"]) == pytest.approx(
                float(state["best_score"]), abs=1e-4
            )
    assert (tmp_path / "elastic" / "out" / "best.ckpt").exists()


def test_what_cannot_be_resized_is_refused_with_advice(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from shoal.integrations.lightning import ShoalStrategy

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=ShoalStrategy(), devices=1, max_epochs=1, limit_train_batches=2, **quiet)
    with pytest.raises(ValueError, match="Subset"):
        trainer.fit(BoringModel())
