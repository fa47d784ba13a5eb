"""Real processes: a fine-tuning script with Transformers, resized and hit by a lost worker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from elastic_lab import QUICK, run_script
from example_lab import ExampleLab

from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev

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


@pytest.mark.parametrize(("max_steps", "ends_at"), [(30, 15), (9, 9)], ids=["early stopping", "max_steps"])
def test_two_workers_stop_where_one_does_and_return_to_the_same_best_model(
    tmp_path: Path, zygote: Zygote, max_steps: int, ends_at: int
) -> None:
    script = str(Path(__file__).parent / "scripts" / "stopping.py")
    env = {"MAX_STEPS": str(max_steps)}
    (tmp_path / "alone").mkdir()
    exit_, text = run_script(
        zygote, [script], {"OUTPUT_DIR": str(tmp_path / "one"), **env}, tmp_path / "alone"
    )
    assert exit_.ok, text
    two = {"OUTPUT_DIR": str(tmp_path / "two"), **env}
    with LocalJob([script], 2, directory=tmp_path / "job", zygote=zygote, timing=QUICK, env=two) as job:
        end = job.wait_end()
        assert isinstance(end, ev.JobFinished), (end, job.logs())
        job.wait_gone(60)
    (expected,) = [json.loads(file.read_text()) for file in (tmp_path / "one").glob("*.json")]
    found = [json.loads(file.read_text()) for file in (tmp_path / "two").glob("*.json")]
    assert expected["steps"] == ends_at
    assert len(found) == 2
    for each in found:
        assert each["steps"] == ends_at
        for name in ("losses", "evaluated", "weights"):
            assert each[name] == pytest.approx(expected[name], abs=2e-4, rel=1e-5)


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
