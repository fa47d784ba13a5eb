"""Real processes: a Lightning script, resized and hit by a lost worker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")

from elastic_lab import QUICK
from example_lab import ExampleLab

import torch
from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev


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


def test_a_resized_trainer_toggles_two_optimizers_as_an_undisturbed_one(
    tmp_path: Path, zygote: Zygote
) -> None:
    lab = ExampleLab(tmp_path, zygote, str(Path(__file__).parent / "scripts" / "gan.py"))
    expected, found = final(lab.alone()), final(lab.resized())
    assert found["global_step"] == expected["global_step"] == 240  # each optimizer counts
    for name, value in expected["state_dict"].items():
        assert torch.allclose(found["state_dict"][name], value, atol=1e-4), name


def metrics_of_two_workers(directory: Path, zygote: Zygote, **env: str) -> list[dict[str, float]]:
    script = str(Path(__file__).parent / "scripts" / "lightning_metrics.py")
    out = directory / "out"
    env = {"OUTPUT_DIR": str(out), **env}
    with LocalJob([script], 2, directory=directory, zygote=zygote, timing=QUICK, env=env) as job:
        end = job.wait_end()
        assert isinstance(end, ev.JobFinished), (end, job.logs())
        assert end.stopped is None, "it trained all epochs"
        job.wait_gone(60)
    found = [json.loads(file.read_text()) for file in out.glob("*.json")]
    assert len(found) == 2
    return found


def test_metrics_of_uneven_parts_are_those_of_one_process_on_every_worker(
    tmp_path: Path, zygote: Zygote
) -> None:
    for metrics in metrics_of_two_workers(tmp_path, zygote):
        # The training data are 0 to 9 in batches of 5, the validation data 0 to 4 in batches of 2.
        assert metrics == pytest.approx(
            {
                "epoch_mean": 4.5, "val_mean": 2.0, "val_sum": 10.0, "val_max": 4.0, "val_min": 0.0, "val_metric": 2.0,
                "step_mean": 7.0, "epoch_sum": 45.0, "epoch_metric": 4.5, "limit": 1.0,
            }
        )  # fmt: skip


def test_metrics_of_an_epoch_are_of_all_workers_without_sync_dist(tmp_path: Path, zygote: Zygote) -> None:
    found = metrics_of_two_workers(tmp_path, zygote, SYNC="")
    for metrics in found:
        values = {
            name: metrics[name] for name in ("val_mean", "val_sum", "val_max", "epoch_mean", "epoch_sum")
        }
        assert values == {
            "val_mean": 2.0,
            "val_sum": 10.0,
            "val_max": 4.0,
            "epoch_mean": 4.5,
            "epoch_sum": 45.0,
        }
    steps = sorted(metrics["step_mean"] for metrics in found)
    assert steps == [6.0, 8.5], "each worker's own part of the last batch, 5 to 9"


def test_a_worker_without_validation_data_counts_nothing_and_knows_the_metrics(
    tmp_path: Path, zygote: Zygote
) -> None:
    # The only sample is 3. The second worker validates it, too, so that it knows the names.
    for metrics in metrics_of_two_workers(tmp_path, zygote, VALIDATION="1", FIRST="3"):
        found = {name: value for name, value in metrics.items() if name.startswith("val_")}
        assert found == {"val_mean": 3.0, "val_sum": 3.0, "val_max": 3.0, "val_min": 3.0, "val_metric": 3.0}


def test_a_worker_that_joins_at_the_end_of_an_epoch_takes_part_in_its_metrics(
    tmp_path: Path, zygote: Zygote
) -> None:
    script = str(Path(__file__).parent / "scripts" / "lightning_metrics.py")
    # One step for each epoch. No worker is killed: with such epochs it would often be between the end of its validation
    # and the sum of the metrics, and a worker that is lost there takes its part with it.
    out = ExampleLab(tmp_path, zygote, script).resized(kill=False, SAMPLES="5", EPOCHS="60")
    found = [json.loads(file.read_text()) for file in out.glob("*.json")]
    assert found
    for metrics in found:
        assert (metrics["epoch_mean"], metrics["epoch_sum"], metrics["val_mean"]) == (2.0, 10.0, 2.0)


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_worker_without_a_part_of_a_batch_counts_nothing_in_the_metrics_of_the_epoch(
    tmp_path: Path, zygote: Zygote, accumulate: str
) -> None:
    # The last batch of 0 to 10 in batches of 5 has one sample: one of the two workers has none.
    for metrics in metrics_of_two_workers(tmp_path, zygote, SAMPLES="11", ACCUMULATE=accumulate):
        found = {name: metrics[name] for name in ("step_mean", "epoch_mean", "epoch_sum", "epoch_metric")}
        assert found == pytest.approx(
            {"step_mean": 10.0, "epoch_mean": 5.0, "epoch_sum": 55.0, "epoch_metric": 5.0}
        )


@pytest.mark.parametrize(("limit", "samples"), [("2", 4), ("0.5", 2)], ids=["two batches", "half of three"])
def test_limit_val_batches_counts_the_batches_of_one_process(
    tmp_path: Path, zygote: Zygote, limit: str, samples: int
) -> None:
    used = range(samples)
    for metrics in metrics_of_two_workers(tmp_path, zygote, LIMIT=limit):
        assert metrics["val_sum"] == sum(used)
        assert metrics["val_mean"] == metrics["val_metric"] == pytest.approx(sum(used) / samples)
        assert metrics["val_max"] == max(used)
        assert metrics["limit"] == float(limit), "the Trainer has its limit again"


def test_what_cannot_be_resized_is_refused_with_advice(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer, callbacks
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torch.utils.data import DataLoader, SubsetRandomSampler

    from shoal.integrations.lightning import ShoalStrategy

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=ShoalStrategy(), devices=1, max_epochs=1, limit_train_batches=2, **quiet)
    with pytest.raises(ValueError, match="Subset"):
        trainer.fit(BoringModel())
    chosen = DataLoader(RandomDataset(32, 8), sampler=SubsetRandomSampler([0, 1]))
    trainer = Trainer(strategy=ShoalStrategy(), devices=1, max_epochs=1, **quiet)
    with pytest.raises(ValueError, match=r"sampler of your own .*Subset"):
        trainer.fit(BoringModel(), val_dataloaders=chosen)
    for averaging in ("StochasticWeightAveraging", "WeightAveraging"):
        if hasattr(callbacks, averaging):  # Lightning 2.5 has only the first
            made = getattr(callbacks, averaging)(**({"swa_lrs": 0.1} if "Stochastic" in averaging else {}))
            trainer = Trainer(strategy=ShoalStrategy(), devices=1, max_epochs=1, callbacks=[made], **quiet)
            with pytest.raises(ValueError, match=f"leave out {averaging}"):
                trainer.fit(BoringModel())


def test_a_trainer_that_is_resumed_after_its_last_epoch_trains_no_more(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torch.utils.data import DataLoader

    import shoal.torch as shoal
    from shoal.integrations.lightning import ShoalStrategy

    class Boring(BoringModel):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(RandomDataset(32, 8), batch_size=4)

        val_dataloader = None

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for _ in range(2):
        job = shoal.init(checkpoint=tmp_path / "state.pt")
        Trainer(strategy=ShoalStrategy(job=job), devices=1, max_epochs=2, **quiet).fit(Boring())
        assert (job.position.epoch, job.position.step) == (2, 4)
        assert job.checkpoint()


def test_a_newcomer_has_all_that_the_others_know_of_checkpoints_and_the_run_of_mlflow(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers.logger import DummyLogger

    from shoal.integrations.lightning.state import TravellingState

    class MLflow(DummyLogger):
        """Has the structure of Lightning's MLFlowLogger: it begins a run unless it has the id of one."""

        _run_id: str | None = None

        @property
        def version(self) -> str | None:
            return self._run_id

    job = SimpleNamespace(parts=SimpleNamespace(steps=SimpleNamespace(present=None)))
    checkpoints = [ModelCheckpoint(str(tmp_path), monitor="val_loss") for _ in range(2)]
    first, second = (
        TravellingState(Trainer(logger=MLflow(), callbacks=[one], enable_progress_bar=False), job)
        for one in checkpoints
    )
    first._trainer.logger._run_id = "abc"
    for name in ("best_model_score", "current_score", "kth_value"):
        setattr(checkpoints[0], name, torch.tensor(0.5))
    checkpoints[0].best_model_path = checkpoints[0].kth_best_model_path = str(tmp_path / "best.ckpt")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict(), "or each comparison of job.state finds a difference"
    assert second._trainer.logger.version == "abc"
