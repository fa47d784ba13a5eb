"""Real processes: a fine-tuning script with Transformers, resized and hit by a lost worker."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from accelerate import dispatch_model
from elastic_lab import QUICK, run_script, until
from example_lab import PACED, ExampleLab
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import torch
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
        assert (end.stopped is None) == (ends_at == max_steps), "an early end is reported as such"
        job.wait_gone(60)
    (expected,) = [json.loads(file.read_text()) for file in (tmp_path / "one" / "found").iterdir()]
    found = [json.loads(file.read_text()) for file in (tmp_path / "two" / "found").iterdir()]
    assert expected["steps"] == ends_at
    assert len(found) == 2
    for each in found:
        assert each["steps"] == ends_at
        for name in ("losses", "evaluated", "weights"):
            assert each[name] == pytest.approx(expected[name], abs=2e-4, rel=1e-5)


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_the_mean_over_the_tokens_of_uneven_parts_is_that_of_one_process_if_the_model_computes_it(
    tmp_path: Path, zygote: Zygote, accumulate: str
) -> None:
    script = str(Path(__file__).parent / "scripts" / "plain_forward.py")
    one, two = ({"OUTPUT_DIR": str(tmp_path / name), "ACCUMULATE": accumulate} for name in ("one", "two"))
    (tmp_path / "alone").mkdir()
    exit_, text = run_script(zygote, [script], one, tmp_path / "alone")
    assert exit_.ok, text
    with LocalJob([script], 2, directory=tmp_path / "job", zygote=zygote, timing=QUICK, env=two) as job:
        end = job.wait_end()
        assert isinstance(end, ev.JobFinished), (end, job.logs())
        job.wait_gone(60)
    expected = json.loads((tmp_path / "one" / "alone.json").read_text())
    found = [json.loads(file.read_text()) for file in (tmp_path / "two").iterdir()]
    assert len(found) == 2
    for each in found:
        assert each["losses"] == pytest.approx(expected["losses"], abs=2e-4)
        assert each["weights"] == pytest.approx(expected["weights"], rel=1e-5)


def test_a_resized_trainer_stops_early_and_returns_to_the_best_model_of_an_undisturbed_one(
    tmp_path: Path, zygote: Zygote
) -> None:
    """The resizes begin before the best checkpoint, and another worker than the one that saved it returns to it."""
    lab = ExampleLab(tmp_path, zygote, str(Path(__file__).parent / "scripts" / "stopping.py"))
    env = {"MAX_STEPS": "300", "EVAL_STEPS": "40"}
    alone, resized = lab.alone(**env), lab.resized(**env)
    expected, found, last = (
        load_file(where / "model.safetensors") for where in (alone, resized, alone / "checkpoint-120")
    )
    assert (resized / "checkpoint-120").exists()
    assert not (resized / "checkpoint-160").exists(), "it stopped early"
    assert any(not torch.allclose(last[name], value, atol=1e-2) for name, value in expected.items())
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-3), name


def tracked_and_taken_over(directory: Path, zygote: Zygote, **env: str) -> tuple[str, str]:
    """Train, and kill rank 0. Returns the names of rank 0 and of the worker that takes over from it."""
    script = str(Path(__file__).parent / "scripts" / "tracked.py")
    out = directory / "out"
    env = {"LAB_DIR": str(directory), "OUTPUT_DIR": str(out), **env}
    with LocalJob([str(PACED), script], 2, directory=directory, zygote=zygote, timing=QUICK, env=env) as job:
        job.wait_size(2)
        first, second = job.handle.state.active.members
        until(lambda: (out / first).exists() and (out / first).read_text())
        job.kill(first)
        (directory / "hurry").touch()
        end = job.wait_end()
        assert isinstance(end, ev.JobFinished), (end, job.logs())
        job.wait_gone(60)
    return first, second


def test_the_worker_that_takes_over_from_rank_0_opens_the_tracker_and_the_progress_bar(
    tmp_path: Path, zygote: Zygote
) -> None:
    _, second = tracked_and_taken_over(tmp_path, zygote)
    steps = [int(line) for line in (tmp_path / "out" / second).read_text().split()]
    assert steps[-2:] == [30, 30], "the last step, and the summary at the end"
    assert steps[:-1] == list(range(steps[0], 31))


def test_the_worker_that_takes_over_from_rank_0_goes_on_with_the_run_of_mlflow(
    tmp_path: Path, zygote: Zygote
) -> None:
    """With a small module in the place of MLflow: the real one has many dependencies."""
    run, other = ({"shoal.run": name} for name in ("shoal-7-0a1b2c3d", "shoal-6-4e5f6a7b"))
    env = {
        "SHOAL_RUN_ID": run["shoal.run"],
        "MLFLOW_RUN_CONTEXT": json.dumps(run),
        "MLFLOW": str(Path(__file__).parent / "scripts" / "fakes"),
    }
    runs = tmp_path / "out" / "runs"
    runs.mkdir(parents=True)
    (runs / "other.jsonl").write_text(json.dumps({"tags": other}) + "\n")
    _, second = tracked_and_taken_over(tmp_path, zygote, **env)
    (file,) = (path for path in runs.iterdir() if path.stem != "other")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0] == {"tags": run}
    steps = [row["step"] for row in rows if "loss" in row]
    assert (steps[0], steps[-1]) == (1, 30), "the first worker's and the second one's"
    assert rows[-1] == {"ended": second}


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(directory), use_cpu=True, report_to="none", **options)


def small_model() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"fsdp": "full_shard"}, "job.shard"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
    ],
)
def test_arguments_that_cannot_be_resized_are_refused_with_advice(
    tmp_path: Path, options: dict[str, Any], advice: str
) -> None:
    from shoal.integrations.transformers import ElasticTrainer

    ElasticTrainer(model=small_model(), args=arguments(tmp_path))
    with pytest.raises(ValueError, match=advice):
        ElasticTrainer(model=small_model(), args=arguments(tmp_path, **options))


@pytest.mark.parametrize("sharding", ["DEEPSPEED", "FSDP"])
def test_sharding_that_accelerates_launcher_asks_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
) -> None:
    from shoal.integrations.transformers import ElasticTrainer

    args = arguments(tmp_path)
    monkeypatch.setenv(f"ACCELERATE_USE_{sharding}", "true")
    with pytest.raises(ValueError, match=rf"ACCELERATE_USE_{sharding}\)"):
        ElasticTrainer(model=small_model(), args=args)


def test_a_refused_trainer_has_joined_its_job_which_learns_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.integrations.transformers import ElasticTrainer, trainer

    begun: list[int] = []
    monkeypatch.setattr(trainer.shoal, "init", lambda seed: begun.append(seed))
    args = arguments(tmp_path, seed=5)
    assert args.deepspeed is None
    args.deepspeed = "zero3.json"  # the arguments take it only where DeepSpeed is installed
    with pytest.raises(ValueError, match="DeepSpeed"):
        ElasticTrainer(model=small_model(), args=args)
    assert begun == [5]


def test_a_model_spread_over_devices_is_refused(tmp_path: Path) -> None:
    from shoal.integrations.transformers import ElasticTrainer

    ElasticTrainer(model=dispatch_model(small_model(), {"": "cpu"}), args=arguments(tmp_path))
    spread = dispatch_model(
        small_model(), {"transformer": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=str(tmp_path)
    )
    with pytest.raises(ValueError, match="device_map"):
        ElasticTrainer(model=spread, args=arguments(tmp_path))


def test_a_version_of_transformers_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.integrations import transformers as integration

    def reload(version: str) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: version)
        importlib.reload(integration)

    with pytest.raises(ImportError, match=r"needs Transformers 5\.3 or newer, not 5\.2\.0: pip install"):
        reload("5.2.0")
    for enough in ("5.3.0", "5.10.4", "6.0.0.dev0", "5.3rc1", "6"):
        reload(enough)
