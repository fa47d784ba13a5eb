"""Real processes: a fine-tuning script with Transformers, resized and hit by a lost worker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from example_lab import ExampleLab

from shoal.executors.zygote import Zygote

VOLATILE = ("runtime", "per_second", "total_flos")


def history(output: Path) -> list[dict[str, Any]]:
    """What the Trainer logged, without durations, as of its newest checkpoint."""
    newest = max(output.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    rows = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in row.items() if not k.endswith(VOLATILE)} for row in rows]


def test_a_resized_trainer_logs_evaluates_and_saves_as_an_undisturbed_one(
    tmp_path: Path, zygote: Zygote
) -> None:
    lab = ExampleLab(tmp_path, zygote, "transformers/fine_tune.py")
    alone, resized = lab.alone(), lab.resized()
    expected, found = history(alone), history(resized)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected):
        assert row == pytest.approx(other, abs=2e-4)
    assert {p.name for p in resized.glob("checkpoint-*")} == {p.name for p in alone.glob("checkpoint-*")}
    assert (resized / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"deepspeed": "zero3.json"}, "DeepSpeed"),
        ({"fsdp": "full_shard"}, "job.shard"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
    ],
)
def test_arguments_that_cannot_be_resized_are_refused_with_advice(
    options: dict[str, Any], advice: str
) -> None:
    from shoal.integrations.transformers.checks import check_arguments

    usual = {
        "deepspeed": None,
        "fsdp": "",
        "auto_find_batch_size": False,
        "batch_eval_metrics": False,
        "n_gpu": 0,
    }
    check_arguments(SimpleNamespace(**usual))
    with pytest.raises(ValueError, match=advice):
        check_arguments(SimpleNamespace(**{**usual, **options}))


def test_a_model_spread_over_devices_is_refused() -> None:
    from shoal.integrations.transformers.checks import check_model

    check_model(SimpleNamespace(hf_device_map={"": 0}))
    with pytest.raises(ValueError, match="device_map"):
        check_model(SimpleNamespace(hf_device_map={"a": 0, "b": 1}))
