"""Two epochs over values that every metric can be computed from by hand. Each worker writes what its Trainer knows."""

import json
import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import torch
from shoal.integrations.lightning import ShoalStrategy

OUTPUT = Path(os.environ["OUTPUT_DIR"])
SYNC = bool(os.environ.get("SYNC", "yes"))


class Values(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.metric = MeanMetric()
        self.epoch_metric = MeanMetric()

    def training_step(self, batch, index):
        (x,) = batch
        self.log("step_mean", x.mean(), on_step=True, on_epoch=False, sync_dist=SYNC)
        self.log("epoch_mean", x.mean(), on_step=False, on_epoch=True, batch_size=len(x), sync_dist=SYNC)
        self.log("epoch_sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=SYNC)
        self.epoch_metric(x)
        self.log("epoch_metric", self.epoch_metric, on_step=False, on_epoch=True)
        return (self.weight * x).mean()

    def validation_step(self, batch, index):
        (x,) = batch
        options = {"batch_size": len(x), "sync_dist": SYNC}
        self.log("val_mean", x.mean(), **options)
        for name in ("sum", "max", "min"):
            self.log(f"val_{name}", getattr(x, name)(), reduce_fx=name, **options)
        self.metric(x)
        self.log("val_metric", self.metric)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


limit = os.environ.get("LIMIT", "1.0")
strategy = ShoalStrategy()
trainer = Trainer(
    strategy=strategy, devices=1, max_epochs=int(os.environ.get("EPOCHS", "2")),
    accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
    limit_val_batches=float(limit) if "." in limit else int(limit), logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
train = DataLoader(TensorDataset(torch.arange(float(os.environ.get("SAMPLES", "10")))), batch_size=5)
first, samples = float(os.environ.get("FIRST", "0")), int(os.environ.get("VALIDATION", "5"))
validation = DataLoader(TensorDataset(first + torch.arange(samples)), batch_size=2)
trainer.fit(Values(), train, validation)
OUTPUT.mkdir(exist_ok=True)
found = {name: float(value) for name, value in trainer.callback_metrics.items()}
found["limit"] = trainer.limit_val_batches
(OUTPUT / f"{os.environ.get('SHOAL_WORKER', 'alone')}.json").write_text(json.dumps(found))
