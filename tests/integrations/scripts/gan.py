"""Lightning: two networks against each other, optimised by hand in turn, with `toggle_optimizer`."""

import os

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import torch
from shoal.integrations.lightning import ShoalStrategy
from torch import nn


class Gan(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def believed(self, x: torch.Tensor, true: bool) -> torch.Tensor:
        scores = self.judge(x)
        return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(true)))

    def training_step(self, batch, index):
        real, noise = batch
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        maker.zero_grad()
        self.manual_backward(self.believed(self.maker(noise), True))
        maker.step()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        judge.zero_grad()
        made = self.maker(noise).detach()
        self.manual_backward((self.believed(real, True) + self.believed(made, False)) / 2)
        judge.step()
        self.untoggle_optimizer(judge)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=2e-3) for part in (self.maker, self.judge)]


torch.manual_seed(0)
data = TensorDataset(torch.randn(960, 2) * 0.5 + 1.0, torch.randn(960, 2))
trainer = Trainer(
    strategy=ShoalStrategy(), devices=1, max_epochs=4, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Gan(), DataLoader(data, batch_size=32, shuffle=True))
trainer.save_checkpoint(os.path.join(os.environ["OUTPUT_DIR"], "last.ckpt"))
