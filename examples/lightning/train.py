"""Train a small classifier with Lightning, elastically. The strategy is all that differs from a plain script.

    python examples/lightning/train.py                                      # one process
    shoal run --gpus 1..4 -- python examples/lightning/train.py             # elastically

With MANUAL=1 the module optimises by hand, with two optimizers.
"""

from __future__ import annotations

import os

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import torch
from shoal.integrations.lightning import ShoalStrategy
from torch import nn


def spirals(count: int, seed: int) -> TensorDataset:
    """Points on three spirals, and which one each is on."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    angle = 4 * radius + label * 2.1 + 0.2 * torch.randn(count, generator=random)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def loss(self, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        scores = self.head(self.body(x))
        return nn.functional.cross_entropy(scores, y), scores

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss, _ = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        loss, scores = self.loss(batch)
        self.log("val_loss", loss)
        self.accuracy(scores, batch[1])
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


class ByHand(Classifier):
    """Two optimizers, one for the body and one for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        body, head = self.optimizers()
        loss, _ = self.loss(batch)
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(loss)
        body.step()
        head.step()
        self.log("train_loss", loss, on_step=True, on_epoch=False, sync_dist=True)

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.body.parameters(), lr=3e-3),
            torch.optim.AdamW(self.head.parameters(), lr=1e-3),
        ]


def main() -> None:
    torch.manual_seed(0)
    output = os.environ.get("OUTPUT_DIR", "trained")
    trainer = Trainer(
        strategy=ShoalStrategy(),
        accelerator="auto",
        devices=1,
        max_epochs=int(os.environ.get("EPOCHS", "5")),
        accumulate_grad_batches=1 if "MANUAL" in os.environ else 2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(output, name="log", version=""),
        callbacks=[
            ModelCheckpoint(output, monitor="val_loss", save_last=True, filename="best"),
            EarlyStopping("val_loss", patience=3),
        ],
    )
    module = ByHand() if "MANUAL" in os.environ else Classifier()
    trainer.fit(
        module,
        DataLoader(spirals(1200, seed=1), batch_size=32, shuffle=True),
        DataLoader(spirals(300, seed=2), batch_size=50),
    )


if __name__ == "__main__":
    main()
